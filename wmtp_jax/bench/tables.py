"""The benchmarks' results as tables for people."""

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from wmtp_jax.bench.accept import ContextResult, DrafterResult
from wmtp_jax.bench.acceptance import Estimate
from wmtp_jax.bench.options import NATIVE, AcceptOptions
from wmtp_jax.bench.start import Footprint, StartResult
from wmtp_jax.bench.timing import Spread
from wmtp_jax.bench.versus_hf import Race

_WIDTH = 160


def show(table: Table) -> None:
    """Prints to standard output, as wide as the terminal or, where there is none, as a table needs."""
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def accept_table(results: Sequence[ContextResult], options: AcceptOptions, trained_context: int) -> Table:
    """A section a context, a line a drafter."""
    table = Table(caption=_accept_caption(results, options, trained_context))
    for title in ("context", "draft window"):
        table.add_column(title)
    for j in range(options.gamma):
        table.add_column(f"draft {j + 1}", justify="right")
    for title in ("acceptance length", "minus native", "draft cache", "same text"):
        table.add_column(title, justify="right")
    for result in results:
        context = f"{result.context}{'*' if result.beyond_trained else ''}"
        for index, drafter in enumerate(result.drafters):
            last = index == len(result.drafters) - 1
            table.add_row("" if index else context, *_accept_cells(drafter), end_section=last)
    return table


def _accept_cells(drafter: DrafterResult) -> list[str]:
    difference = drafter.first_difference
    return [
        str(drafter.window) if drafter.window else NATIVE,
        *(_share(rate) for rate in drafter.acceptance),
        _figure(drafter.acceptance_length),
        "" if drafter.length_minus_native is None else _figure(drafter.length_minus_native, sign=True),
        _kib(drafter.draft_cache_bytes_per_row),
        "yes" if difference is None else f"no: prompt {difference.prompt}, token {difference.token}",
    ]


def _accept_caption(results: Sequence[ContextResult], options: AcceptOptions, trained_context: int) -> str:
    lines = [
        f"gamma {options.gamma}, sink {options.sink}, temperature {options.temperature:g}: {options.new_tokens} tokens "
        f"after each of {results[0].prompts} prompts",
        "draft j: right among the steps that reached it; ± standard error over prompts; same text as plain decoding",
        "4-token runs that repeat earlier new text: "
        + ", ".join(f"{_percent(result.repeated)} at {result.context}" for result in results),
    ]
    if any(result.beyond_trained for result in results):
        lines.append(f"* beyond the {trained_context} tokens that the model was made for")
    return "\n".join(lines)


def race_table(race: Race) -> Table:
    """A line a contender."""
    caption = (
        f"{race.new_tokens} tokens after a prompt of {race.prompt_tokens}, greedy, float32, {race.threads} threads; "
        "decoding alone, warm; median (lowest to highest)"
    )
    for name, divergence in race.divergences.items():
        if divergence is not None:
            caption += (
                f"\n{name} differs from token {divergence.token} on, where the two best logits of transformers are "
                f"{divergence.logit_lead:.1e} apart"
            )
    table = Table(caption=caption)
    table.add_column("decoding")
    for title in ("tokens/s", "ratio", "first token s", "whole run s", "same text"):
        table.add_column(title, justify="right")
    for name, timing in race.timings.items():
        table.add_row(
            name,
            _spread(timing.tokens_per_second, 1),
            f"{race.ratios[name]:.2f}",
            _spread(timing.first_seconds, 3),
            _spread(timing.seconds, 2),
            "yes" if race.divergences[name] is None else "no",
        )
    return table


def start_table(results: Sequence[StartResult], footprints: Sequence[Footprint]) -> Table:
    """Two lines a prompt: cold and warm."""
    caption = (
        "seconds from the start of the process; cold: empty compilation cache, warm: the next runs, median (lowest to "
        "highest)\npeak memory = weights + caches + rest"
    )
    table = Table(caption=caption)
    for title in ("prompt tokens", "start"):
        table.add_column(title)
    for title in ("first text s", "end s", "peak MiB", "weights MiB", "caches MiB", "rest MiB"):
        table.add_column(title, justify="right")
    for result, need in zip(results, footprints, strict=True):
        for name, runs in (("cold", [result.cold]), ("warm", result.warm)):
            peak = max(run.peak_bytes for run in runs)
            table.add_row(
                str(result.context) if name == "cold" else "",
                name,
                _spread(Spread(run.first_text_seconds for run in runs), 1),
                _spread(Spread(run.end_seconds for run in runs), 1),
                *(_mib(size) for size in (peak, need.weights_bytes, need.caches_bytes, need.rest(peak))),
                end_section=name == "warm",
            )
    return table


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


def _spread(values: Spread, digits: int) -> str:
    middle = f"{values.median:.{digits}f}"
    return middle if len(values) < 2 else f"{middle} ({values.low:.{digits}f} to {values.high:.{digits}f})"


def _kib(size: int) -> str:
    return f"{size / 2**10:,.0f} KiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
