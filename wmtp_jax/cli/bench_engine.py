"""`wmtp bench engine`: many requests at once, and a short one beside a long prompt."""

from pathlib import Path
from typing import Annotated

import typer

from wmtp_jax.bench import options as settings
from wmtp_jax.cli.output import note, print_json
from wmtp_jax.folders import DEMO
from wmtp_jax.units import parse_tokens

_Default = settings.EngineBenchOptions


def register_engine(bench: typer.Typer) -> None:
    """Adds the command."""
    bench.command("engine")(engine_command)


def engine_command(
    model: Annotated[str, typer.Option(metavar="PATH", help="A model folder or hub id.")] = DEMO,
    clients: Annotated[str, typer.Option(help="Requests at the same time.")] = "1,4,16",
    requests: Annotated[int, typer.Option(help="Of each number of clients, a round.")] = _Default.requests,
    prompt: Annotated[int, typer.Option(help="Tokens of their prompts.")] = _Default.prompt,
    new_tokens: Annotated[int, typer.Option(help="After each prompt.")] = _Default.new_tokens,
    long: Annotated[str, typer.Option(help="Tokens of the prompt beside which a short one starts; 0 is none.")] = "31K",
    gamma: Annotated[int, typer.Option(help="Drafted tokens a step.")] = _Default.gamma,
    rest: Annotated[
        bool, typer.Option(help="Draft nothing for a number of rows at which drafts cost more than they bring.")
    ] = _Default.rest,
    window: Annotated[int, typer.Option(help="Tokens the draft head sees; 0 is all.")] = _Default.window,
    sink: Annotated[int, typer.Option(help="First tokens it sees besides a window.")] = _Default.sink,
    repeats: Annotated[int, typer.Option(help="Measured rounds.")] = _Default.repeats,
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text or JSON lines.", show_default="the packaged held-out text")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tokens a second of many requests at once, and how long a short one waits beside a long prompt."""
    given = settings.EngineBenchOptions(
        clients=settings.parse_counts("clients", clients),
        requests=requests,
        prompt=prompt,
        new_tokens=new_tokens,
        long=0 if long == "0" else parse_tokens(long, "long"),
        gamma=gamma,
        rest=rest,
        window=window,
        sink=sink,
        repeats=repeats,
    )
    from wmtp_jax.bench import engine, engine_table, tables
    from wmtp_jax.model import load

    loaded = load(model)
    engine.require_positions(loaded, given)
    throughput = engine.measure_throughput(loaded, text, given, note)
    if not json:
        tables.show(engine_table.throughput_table(throughput, given))
    first = engine.measure_first_token(loaded, text, given, note) if given.long else None
    if json:
        print_json(dict(model=model, options=given, throughput=throughput, first_token=first))
    elif first is not None:
        tables.show(engine_table.first_token_table(first))
