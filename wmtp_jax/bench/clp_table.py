"""The results of ``bench clp`` as a table, a picture and a file of texts."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from wmtp_jax.bench.clp import ClpResult
from wmtp_jax.bench.clp_ways import PLAIN
from wmtp_jax.bench.options import ClpOptions
from wmtp_jax.bench.picture import new_figure, save
from wmtp_jax.bench.timing import Estimated

_TITLES = (
    "tokens a step",
    "step ms",
    "speedup",
    "95 %",
    "right by head",
    "mean span",
    "repeated 3, 4",
    "distinct 1, 2",
    "perplexity",
    "as greedy",
    "same",
)


def clp_table(results: Sequence[ClpResult], options: ClpOptions, machine: str) -> Table:
    """A line a way and batch size. A ``!`` marks a speedup that the tokens a step cannot explain."""
    table = Table(
        caption=f"{machine}; {options.prompts} prompts, {options.new_tokens} new tokens at most, greedy; "
        f"{options.repeats} rounds; intervals by bootstrap over batches\n"
        "verified ways write the backbone's text; all others change it"
    )
    table.add_column("rows")
    table.add_column("way", no_wrap=True)
    for title in _TITLES:
        table.add_column(title, justify="right")
    for index, result in enumerate(results):
        last = index + 1 == len(results) or results[index + 1].rows != result.rows
        q = result.quality
        table.add_row(
            str(result.rows) if result.way == PLAIN else "",
            result.way,
            f"{result.tokens_a_step:.3f}",
            f"{result.step_ms:.2f}",
            f"{result.speedup.value:.3f}{' !' if result.suspect else ''}",
            _range(result.speedup),
            " ".join("-" if math.isnan(a) else f"{a:.2f}" for a in result.accuracy or ()),
            f"{result.tokens_a_step - 1:.3f}",
            f"{q.repeated_3:.3f} {q.repeated_4:.3f}",
            f"{q.distinct_1:.2f} {q.distinct_2:.2f}",
            f"{q.perplexity:.2f}",
            f"{q.agreed:.1f}",
            f"{q.same:.0%}",
            end_section=last,
        )
    return table


def _range(values: Estimated) -> str:
    return f"{values.low:.3f} - {values.high:.3f}"


def kinds_table(results: Sequence[ClpResult]) -> Table:
    """The speedup of every way on every kind of prompt."""
    kinds = list(dict.fromkeys(kind for result in results for kind in result.speedup_by_kind))
    table = Table(caption="speedup over plain by kind of prompt, with 95 % intervals")
    table.add_column("rows")
    table.add_column("way", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right")
    for result in results:
        found = result.speedup_by_kind
        cells = [f"{found[kind].value:.3f} ({_range(found[kind])})" if kind in found else "" for kind in kinds]
        table.add_row(str(result.rows) if result.way == PLAIN else "", result.way, *cells)
    return table


def plot_clp(results: Sequence[ClpResult], path: Path) -> None:
    """Speedup against the backbone's perplexity of the text, a panel a batch size, as a PNG."""
    sizes = sorted({result.rows for result in results})
    figure = new_figure(5.5 * len(sizes), 4.5)
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, rows in zip(panels, sizes, strict=True):
        for result in (r for r in results if r.rows == rows):
            color = "tab:blue" if result.verified else "tab:red"
            x, y = result.quality.perplexity, result.speedup.value
            axes.plot([x], [y], "^" if result.verified else "o", color=color)
            axes.annotate(result.way, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axes.axhline(1, color="0.7", linewidth=0.8)
        axes.set(xlabel="perplexity of the text", ylabel="speed over plain", title=f"{rows} rows")
    save(figure, path)


def write_texts(results: Sequence[ClpResult], path: Path) -> None:
    """Every text of every way as JSON lines, to be read."""
    lines = (
        json.dumps({"way": result.way, "rows": result.rows, "prompt": index, "text": text}, ensure_ascii=False)
        for result in results
        for index, text in result.texts.items()
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
