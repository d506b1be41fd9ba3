"""Acceptance as tables for people: all of it, the lengths alone, and what a sink does."""

import math
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from wmtp_jax.bench.accept import ContextResult, DrafterResult
from wmtp_jax.bench.acceptance import Estimate, estimate, length_difference
from wmtp_jax.bench.options import NATIVE, AcceptOptions


def accept_tables(
    results: Sequence[ContextResult], options: AcceptOptions, trained_context: int, max_positions: int
) -> list[Table]:
    """Every figure; then, where there are several tasks or sinks, the tables that compare them."""
    tables = [accept_table(results, options, trained_context, max_positions)]
    if len(options.tasks) > 1:
        tables.append(length_table(results))
    if len(options.sinks) > 1:
        tables.append(sink_table(results, options))
    return tables


def accept_table(
    results: Sequence[ContextResult], options: AcceptOptions, trained_context: int, max_positions: int
) -> Table:
    """A section a task and context, a line a drafter."""
    table = Table(caption=_caption(results, options, trained_context, max_positions))
    for title in ("task", "context", "draft window", "sink"):
        table.add_column(title)
    for j in range(options.gamma):
        table.add_column(f"draft {j + 1}", justify="right")
    for title in ("acceptance length", "minus native", "draft cache", "same text"):
        table.add_column(title, justify="right")
    for result in results:
        for index, drafter in enumerate(result.drafters):
            last = index == len(result.drafters) - 1
            task, context = ("", "") if index else (result.task, _context(result))
            table.add_row(task, context, *_cells(drafter), end_section=last)
    return table


def length_table(results: Sequence[ContextResult]) -> Table:
    """Acceptance length alone: a line a task and context, a column a drafter."""
    table = Table(
        caption="acceptance length; answered: expected answers that occur in the new text; repeats: its 4-token runs "
        "that occurred in it before"
    )
    for title in ("task", "context"):
        table.add_column(title)
    for drafter in results[0].drafters:
        table.add_column(_name(drafter), justify="right")
    for title in ("same text", "answered", "repeats"):
        table.add_column(title, justify="right")
    for index, result in enumerate(results):
        same = "yes" if result.same_text else "no"
        answered = "" if result.answered is None else _percent(result.answered)
        lengths = [_figure(drafter.acceptance_length) for drafter in result.drafters]
        last = index == len(results) - 1 or results[index + 1].task != result.task
        repeats = _percent(result.repeated)
        table.add_row(result.task, _context(result), *lengths, same, answered, repeats, end_section=last)
    return table


def sink_table(results: Sequence[ContextResult], options: AcceptOptions) -> Table:
    """What each sink gains over the smallest one: a line a context and sink, a column a window, over all tasks."""
    base, *others = sorted(options.sinks)
    windows = sorted(window for window in options.windows if window)
    table = Table(caption=f"acceptance length minus that of sink {base}, paired by prompt, over all tasks")
    for title in ("context", "sink"):
        table.add_column(title)
    for window in windows:
        table.add_column(f"window {window}", justify="right")
    for context in options.contexts:
        own = [result for result in results if result.context == context]
        for sink in others:
            gains = [_figure(_sink_gain(own, window, base, sink), sign=True) for window in windows]
            table.add_row(str(context), str(sink), *gains)
    return table


def _sink_gain(results: Sequence[ContextResult], window: int, base: int, sink: int) -> Estimate:
    def prompts(sink: int) -> np.ndarray:
        found = (d for result in results for d in result.drafters if (d.window, d.sink) == (window, sink))
        return np.concatenate([drafter.histograms for drafter in found])

    return estimate(np.stack([prompts(base), prompts(sink)], axis=1), length_difference)


def _cells(drafter: DrafterResult) -> list[str]:
    difference = drafter.first_difference
    return [
        *((str(drafter.window), str(drafter.sink)) if drafter.window else (NATIVE, "")),
        *(_share(rate) for rate in drafter.acceptance),
        _figure(drafter.acceptance_length),
        "" if drafter.length_minus_native is None else _figure(drafter.length_minus_native, sign=True),
        f"{drafter.draft_cache_bytes_per_row / 2**10:,.0f} KiB",
        "yes" if difference is None else f"no: prompt {difference.prompt}, token {difference.token}",
    ]


def _name(drafter: DrafterResult) -> str:
    return f"{drafter.window}\nsink {drafter.sink}" if drafter.window else NATIVE


def _context(result: ContextResult) -> str:
    return f"{result.context}{'*' * (result.beyond_trained + result.beyond_positions)}"


def _caption(results: Sequence[ContextResult], options: AcceptOptions, trained_context: int, max_positions: int) -> str:
    lines = [
        f"gamma {options.gamma}, temperature {options.temperature:g}: {options.new_tokens} tokens after each of "
        f"{results[0].prompts} prompts",
        "draft j: right among the steps that reached it; ± standard error over prompts; same text as plain decoding",
    ]
    if len(options.tasks) == 1:
        repeats = ", ".join(f"{_percent(result.repeated)} at {result.context}" for result in results)
        lines.append(f"4-token runs that repeat earlier new text: {repeats}")
    if any(result.beyond_trained for result in results):
        lines.append(f"* beyond the {trained_context} tokens that the model was made for")
    if any(result.beyond_positions for result in results):
        lines.append(
            f"** beyond the model's max_positions of {max_positions} too, which `wmtp generate` refuses: the text is "
            "that of a model astray, its acceptance is as measured"
        )
    return "\n".join(lines)


def _figure(estimate: Estimate, *, sign: bool = False) -> str:
    if math.isnan(estimate.value):
        return "-"
    value = f"{estimate.value:{'+' if sign else ''}.2f}"
    return value if math.isnan(estimate.error) else f"{value} ± {estimate.error:.2f}"


def _share(estimate: Estimate) -> str:
    if math.isnan(estimate.error):
        return _percent(estimate.value)
    return f"{100 * estimate.value:.1f} ± {100 * estimate.error:.1f} %"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"
