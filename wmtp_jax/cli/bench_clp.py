"""`wmtp bench clp`: every way to use trained heads, trusted and verified, in one run."""

from pathlib import Path
from typing import Annotated

import typer

from wmtp_jax.cli.output import note, print_json
from wmtp_jax.generation.options import GenerateOptions as Defaults


def register_clp(bench: typer.Typer) -> None:
    """Adds the command."""
    bench.command("clp")(clp_command)


def clp_command(
    heads: Annotated[list[str], typer.Option(metavar="PATH", help="Heads of `wmtp train heads`; repeatable.")],
    model: Annotated[str, typer.Option(metavar="PATH", help="Their backbone.")],
    prompts_file: Annotated[Path, typer.Option(help="Prompts: JSON lines with a text each.")],
    prompts: Annotated[int, typer.Option(help="How many of them.")] = 16,
    new_tokens: Annotated[int, typer.Option(help="At most, of each.")] = 96,
    rows: Annotated[str, typer.Option(help="Batch sizes.")] = "1",
    repeats: Annotated[int, typer.Option(help="Measured rounds.")] = 3,
    tau: Annotated[str, typer.Option(help="Of the rules that have a threshold, one or several.")] = str(Defaults.tau),
    only: Annotated[
        str | None, typer.Option(help="Parts of the names of the ways to run, with ; between.", show_default="all")
    ] = None,
    window: Annotated[int, typer.Option(help="Of MTP heads; 0 is native.")] = 0,
    sink: Annotated[int, typer.Option(help="First tokens that the window is joined by.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    texts: Annotated[Path | None, typer.Option(help="Write every text to this file.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw it.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Speed and quality of text with unverified heads (which change it) and with verified ones, beside plain."""
    from wmtp_jax.bench import options as settings

    given = settings.ClpOptions(
        rows=settings.parse_counts("rows", rows),
        prompts=prompts,
        new_tokens=new_tokens,
        repeats=repeats,
        taus=settings.parse_fractions("tau", tau),
        only=() if only is None else tuple(part.strip() for part in only.split(";")),
        window=window,
        sink=sink,
    )
    from wmtp_jax.bench import clp, clp_table, picture, tables
    from wmtp_jax.model import load
    from wmtp_jax.text.documents import read_prompts
    from wmtp_jax.train.distill import encode_prompt

    if plot is not None:
        picture.require_plot(plot)
    asked = read_prompts(prompts_file)
    loaded = load(model, dtype=dtype)
    found = [clp.Asked(prompt.kind, encode_prompt(loaded, prompt.text), index) for index, prompt in enumerate(asked)]
    results = clp.measure(loaded, [Path(path) for path in heads], found, given, note)
    if texts is not None:
        clp_table.write_texts(results, texts)
    if json:
        print_json(dict(model=model, options=given, results=results))
    else:
        machine = f"{_machine()}, weights {loaded.decoder.embedding.dtype}"
        tables.show(clp_table.clp_table(results, given, machine))
        if any(result.speedup_by_kind for result in results):
            tables.show(clp_table.kinds_table(results))
    if plot is not None:
        clp_table.plot_clp(results, plot)


def _machine() -> str:
    import jax

    return jax.default_backend()
