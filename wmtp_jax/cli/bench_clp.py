"""`wmtp bench clp`: every way to use trained heads, trusted and verified, in one run."""

from pathlib import Path
from typing import Annotated

import typer

from wmtp_jax.cli.output import note, print_json
from wmtp_jax.errors import UserError
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
    tau: Annotated[float, typer.Option(help="Of the length predictor.")] = Defaults.tau,
    window: Annotated[int, typer.Option(help="Of MTP heads; 0 is native.")] = 0,
    sink: Annotated[int, typer.Option(help="First tokens that the window is joined by.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    texts: Annotated[Path | None, typer.Option(help="Write every text to this file.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw it.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Speed and quality of text with unverified heads (which change it) and with verified ones, beside plain."""
    from wmtp_jax.bench import options as settings

    given_rows = settings.parse_counts("rows", rows)
    from wmtp_jax.bench import clp, clp_table, picture, tables
    from wmtp_jax.bench.texts import read_texts
    from wmtp_jax.model import load
    from wmtp_jax.train.head_data import encode_prompt

    options = clp.ClpOptions(
        rows=given_rows, prompts=prompts, new_tokens=new_tokens, repeats=repeats, tau=tau, window=window, sink=sink
    )
    if plot is not None:
        picture.require_plot(plot)
    loaded = load(model, dtype=dtype)
    found = [encode_prompt(loaded, text) for text in read_texts(prompts_file)[:prompts]]
    if len(found) < prompts:
        raise UserError(f"--prompts {prompts}: the file has {len(found)}")
    results = clp.measure(loaded, [Path(path) for path in heads], found, options, note)
    if texts is not None:
        clp_table.write_texts(results, texts)
    if json:
        print_json(dict(model=model, options=options, results=results))
    else:
        dtype_name = str(loaded.decoder.embedding.dtype)
        tables.show(clp_table.clp_table(results, options, f"{_machine()}, weights {dtype_name}"))
    if plot is not None:
        clp_table.plot_clp(results, plot)


def _machine() -> str:
    import jax

    return jax.default_backend()
