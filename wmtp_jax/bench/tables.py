"""The benchmarks' results as tables for people; those of acceptance are in ``accept_tables``."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from wmtp_jax.bench.start import Footprint, StartResult
from wmtp_jax.bench.timing import Spread
from wmtp_jax.bench.versus_hf import Race

_WIDTH = 160


def show(table: Table) -> None:
    """Prints to standard output, as wide as the terminal or, where there is none, as a table needs."""
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


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
            spread(timing.tokens_per_second, 1),
            f"{race.ratios[name]:.2f}",
            spread(timing.first_seconds, 3),
            spread(timing.seconds, 2),
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
                spread(Spread(run.first_text_seconds for run in runs), 1),
                spread(Spread(run.end_seconds for run in runs), 1),
                *(_mib(size) for size in (peak, need.weights_bytes, need.caches_bytes, need.rest(peak))),
                end_section=name == "warm",
            )
    return table


def spread(values: Spread, digits: int) -> str:
    """The median, and the ends where there are several values."""
    middle = f"{values.median:.{digits}f}"
    return middle if len(values) < 2 else f"{middle} ({values.low:.{digits}f} to {values.high:.{digits}f})"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"
