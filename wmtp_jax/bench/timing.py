"""Timing contenders side by side: warm, interleaved, decoding apart from reading the prompt."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from wmtp_jax.errors import UserError

# Makes so many new tokens and returns them.
Contender = Callable[[int], list[int]]


class Spread(list[float]):
    """Measured values; its statistics leave out NaN."""

    def _finite(self) -> list[float]:
        return [value for value in self if math.isfinite(value)] or [math.nan]

    @property
    def median(self) -> float:
        """NaN where nothing was measured."""
        return statistics.median(self._finite())

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self._finite())

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self._finite())


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One contender, a value a round: ``first_seconds`` is the run of one token, ``seconds`` the whole one."""

    tokens: list[int]
    first_seconds: Spread
    seconds: Spread

    @property
    def tokens_per_second(self) -> Spread:
        """Tokens after the first over the time that they took; NaN in a round too short to tell."""
        rounds = zip(self.seconds, self.first_seconds, strict=True)
        return Spread(decode_rate(len(self.tokens), whole, first) for whole, first in rounds)


def decode_rate(tokens: int, seconds: float, first_seconds: float) -> float:
    """Tokens a second of decoding: a run of one token is its prompt's cost, which every longer run has too."""
    return (tokens - 1) / (seconds - first_seconds) if seconds > first_seconds else math.nan


def race(
    contenders: Mapping[str, Contender], new_tokens: int, repeats: int, note: Callable[[str], None]
) -> dict[str, Timing]:
    """Times every contender ``repeats`` times in turn, so that whatever slows the machine down slows all of them.

    Each runs both lengths once before, unmeasured: compilation and first allocations are in no figure.
    """
    tokens = {}
    for name, run in contenders.items():
        note(f"{name}: warming up")
        run(1)
        tokens[name] = run(new_tokens)
    timings = {name: Timing(tokens=tokens[name], first_seconds=Spread(), seconds=Spread()) for name in contenders}
    for index in range(repeats):
        note(f"round {index + 1} of {repeats}")
        for name, run in contenders.items():
            timings[name].first_seconds.append(_seconds(run, 1))
            timings[name].seconds.append(_seconds(run, new_tokens))
    return timings


def seconds_of(run: Callable[..., Any], *arguments: Any, repeats: int) -> float:
    """Median seconds of a call on the device, after one that is not measured."""
    jax.block_until_ready(run(*arguments))
    seconds = Spread()
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        seconds.append(time.perf_counter() - begin)
    return seconds.median


def _seconds(run: Contender, new_tokens: int) -> float:
    begin = time.perf_counter()
    run(new_tokens)
    return time.perf_counter() - begin


def usable_cpus() -> Sequence[int]:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


@contextmanager
def limited_to(threads: int) -> Iterator[None]:
    """Pins this process to ``threads`` processors, on which JAX, if not started before, makes as many threads.

    Where the system cannot pin a process nothing happens. Raises UserError where there are fewer processors.
    """
    cpus = usable_cpus()
    if threads > len(cpus):
        raise UserError(f"--threads {threads}: this process may use only {len(cpus)} processors")
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    os.sched_setaffinity(0, cpus[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


class Estimated(NamedTuple):
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def estimated_ratio(above: Sequence[float], below: Sequence[float], draws: int = 1000) -> Estimated:
    """Of two sums over the same samples; the interval by drawing samples anew (bootstrap, percentiles)."""
    x, y = np.asarray(above, float), np.asarray(below, float)
    drawn = np.random.default_rng(0).integers(len(x), size=(draws, len(x)))
    low, high = np.percentile(x[drawn].sum(1) / y[drawn].sum(1), [2.5, 97.5])
    return Estimated(float(x.sum() / y.sum()), float(low), float(high))
