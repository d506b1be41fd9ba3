"""Acceptance length against the draft's window, as a picture."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from wmtp_jax.bench.accept import ContextResult, DrafterResult
from wmtp_jax.bench.options import NATIVE
from wmtp_jax.bench.picture import new_figure, save

_PANEL_INCHES = (4.5, 3.6)
_LINE_STYLES = ("-", "--", ":", "-.")


def plot_acceptance(results: Sequence[ContextResult], path: Path) -> None:
    """Writes a PNG: a panel a task, a color a context, a line style a sink; native is the last place on the axis."""
    tasks = list(dict.fromkeys(result.task for result in results))
    width, height = _PANEL_INCHES
    figure = new_figure(width * len(tasks), height)
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for panel, task in zip(panels, tasks, strict=True):
        _draw([result for result in results if result.task == task], panel)
        panel.set_title(task)
    panels[0].set_ylabel("acceptance length")
    panels[-1].legend(fontsize="small")
    save(figure, path)


def _draw(results: Sequence[ContextResult], panel: Any) -> None:
    drafters = results[0].drafters
    windows = sorted({drafter.window for drafter in drafters if drafter.window})
    ticks = [str(window) for window in windows] + [NATIVE] * any(not drafter.window for drafter in drafters)
    sinks = sorted({drafter.sink for drafter in drafters if drafter.window}) or [0]
    for color, result in enumerate(results):
        for style, sink in zip(cycle(_LINE_STYLES), sinks, strict=False):
            # Native has no sink: it ends every line.
            own = sorted((d for d in result.drafters if d.sink == sink or not d.window), key=_native_last)
            lengths = [drafter.acceptance_length for drafter in own]
            panel.errorbar(
                [ticks.index(str(drafter.window) if drafter.window else NATIVE) for drafter in own],
                [length.value for length in lengths],
                yerr=[length.error for length in lengths],
                label=f"{result.context}, sink {sink}" if len(sinks) > 1 else str(result.context),
                color=f"C{color}",
                linestyle=style,
                marker="o",
                capsize=2,
            )
    panel.set_xticks(range(len(ticks)), ticks)
    panel.set_xlabel("draft window")
    panel.grid(alpha=0.3)


def _native_last(drafter: DrafterResult) -> tuple[bool, int]:
    return not drafter.window, drafter.window
