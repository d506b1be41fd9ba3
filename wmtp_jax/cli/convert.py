"""`wmtp convert`: a Hugging Face folder, hub id or GGUF file into a converted folder."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from wmtp_jax.cli.output import note, print_json

if TYPE_CHECKING:
    from checkpoints_convert.convert import Report


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("convert")(convert_command)


def convert_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A Hugging Face folder, a hub id or a GGUF file.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make.")],
    dtype: Annotated[str, typer.Option(help="Of the stored weights: bfloat16 or float32.")] = "bfloat16",
    no_mtp: Annotated[bool, typer.Option("--no-mtp", help="Leave the draft head out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT once the new one is complete.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert a Hugging Face or GGUF checkpoint, in constant memory; OUT appears complete or not at all."""
    from checkpoints_convert.convert import convert

    with _progress_bar() as progress:
        report = convert(source, out, dtype=dtype, no_mtp=no_mtp, force=force, progress=progress)
    for warning in report.warnings:
        note(f"warning: {warning}")
    if json:
        print_json(report)
    else:
        _print_report(report)


def _print_report(report: "Report") -> None:
    from wmtp_jax.cli.inspect import skipped_lines

    head = "with its draft head" if report.has_mtp else "without a draft head"
    size = f"{report.parameters:,} parameters, {report.parameter_bytes / 1e9:.2f} GB in {report.dtype}"
    print(f"{report.out}: {report.family} {head}, {size}, {report.seconds:.1f} s")
    for line in skipped_lines(report.skipped):
        print(line)


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = ("converting", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("convert", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
