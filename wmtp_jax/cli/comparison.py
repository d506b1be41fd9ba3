"""`wmtp generate --compare`: one prompt without drafts, with the native draft head and with the windowed one."""

import sys
from typing import TYPE_CHECKING, Any

from wmtp_jax.cli.output import note, print_json
from wmtp_jax.cli.terminal import safe_for_terminal

if TYPE_CHECKING:
    from rich.table import Table

    from wmtp_jax.generation.compare import Comparison
    from wmtp_jax.generation.stats import Stats
    from wmtp_jax.model import Model


def compare_command(model: "Model", ids: list[int], options: dict[str, Any], *, json: bool) -> None:
    """Prints the text once and a table, or one JSON object."""
    from rich.console import Console

    from wmtp_jax.generation.compare import compare

    comparison = compare(model, ids, on_run=lambda name: note(f"{name}: warming up, then measuring"), **options)
    if json:
        print_json(_json(comparison))
        return
    text = comparison.runs["plain"].text[0]
    print(safe_for_terminal(text) if sys.stdout.isatty() else text, end="\n\n")
    Console(width=None if sys.stdout.isatty() else 100).print(_table(comparison))


def _json(comparison: "Comparison") -> dict[str, Any]:
    plain = comparison.runs["plain"]
    runs = {name: dict(same_text=comparison.same_text(name), stats=run.stats) for name, run in comparison.runs.items()}
    return dict(
        text=plain.text[0],
        tokens=plain.tokens[0],
        finished=plain.finished[0],
        window=comparison.window,
        sink=comparison.sink,
        window_covers_everything=comparison.covers_everything,
        runs=runs,
    )


def _table(comparison: "Comparison") -> "Table":
    from rich.table import Table

    table = Table(caption=_caption(comparison))
    table.add_column("decoding")
    for title in ("tokens/s", "acceptance length", "step ms", "draft cache bytes", "same text"):
        table.add_column(title, justify="right")
    for name, run in comparison.runs.items():
        table.add_row(name, *_figures(run.stats), "yes" if comparison.same_text(name) else "no")
    return table


def _figures(stats: "Stats") -> tuple[str, str, str, str]:
    return (
        f"{stats.tokens_per_second:.1f}",
        f"{stats.acceptance_length:.2f}",
        f"{stats.step_ms:.2f}",
        f"{stats.draft_cache_bytes:,}",
    )


def _caption(comparison: "Comparison") -> str:
    line = f"warmed up; windowed: window {comparison.window}, sink {comparison.sink}, context {comparison.context}"
    if comparison.covers_everything:
        line += "; the window covers the whole context, so that windowed is native"
    if not all(comparison.same_text(name) for name in comparison.runs):
        line += "; a long run rounds otherwise than single tokens, which can tip a near tie: less so in float32"
    return line
