"""`wmtp plan`: sizes, rows that fit and predicted step costs, from a model's shape alone."""

from typing import Annotated

import typer

from wmtp_jax.cli.output import note, print_json
from wmtp_jax.generation.options import DEFAULT_SINK, DEFAULT_WINDOW

_DEFAULT_SINK_SHOWN = f"{DEFAULT_SINK} with a window"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan")(plan_command)


def plan_command(
    model: Annotated[str, typer.Option(metavar="PRESET", help="A preset, a TOML file or a model folder.")],
    hardware: Annotated[str, typer.Option(help="h200, h100, b200, tpu-v5e, tpu-v6e or cpu: one chip.")],
    context: Annotated[str, typer.Option(help="Committed tokens a row: 4096, 64K, 1M.")] = "1M",
    gamma: Annotated[int, typer.Option(help="Drafted tokens a step.")] = 6,
    window: Annotated[int, typer.Option(help="Tokens a windowed draft sees; 0 plans without.")] = DEFAULT_WINDOW,
    sink: Annotated[
        int | None, typer.Option(help="First tokens it sees besides.", show_default=_DEFAULT_SINK_SHOWN)
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows that a step advances together.")] = 1,
    weights: Annotated[
        str | None, typer.Option(help="bf16, fp8, nvfp4 or float32.", show_default="bf16, on a CPU float32")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="bf16, float16, int8, fp8 or float32.", show_default="bf16, on a CPU float32")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Parameters, bytes, rows that fit and what a step should cost, without building the model."""
    from wmtp_jax.plan.options import PlanOptions
    from wmtp_jax.plan.plan import make_plan
    from wmtp_jax.plan.report import plan_json, print_plan
    from wmtp_jax.units import parse_tokens

    plan = make_plan(
        PlanOptions(
            model=model,
            hardware=hardware,
            context=parse_tokens(context),
            gamma=gamma,
            window=window,
            sink=sink,
            rows=rows,
            weights=weights,
            cache=cache,
        )
    )
    for warning in plan.warnings:
        note(f"warning: {warning}")
    if json:
        print_json(plan_json(plan))
    else:
        print_plan(plan)
