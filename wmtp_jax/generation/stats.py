"""What a run measured."""

import itertools
import math
import statistics
from dataclasses import dataclass, field

import numpy as np

from wmtp_jax.decode.loop import Emitted


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Counts, times and sizes of one run. Figures of steps are NaN where there was none.

    ``accepted_histogram[n]`` counts a row's steps that emitted n accepted drafts and one token more: their tokens are
    ``new_tokens`` less one a row. A step that a stop token or the limit cuts short counts only what it emitted; a stop
    string is found later, so its step and those read with it count whole. ``acceptance_by_position[j]`` is how often
    draft j + 1 was right where the drafts before it were. ``acceptance_length`` is the mean number of tokens a step
    emits: 1 to gamma + 1. ``step_ms`` is the median over host reads and ``tpot_ms`` is
    median(step) / mean(acceptance length). Compilation of the loop is in ``compile_seconds`` alone; that of prefill is
    part of a first call's ``prefill_seconds`` and ``first_token_seconds``. ``tokens_per_second`` are those after each
    row's first token, over the time of the steps. ``step_costs`` are the milliseconds of a step with 0, 1, ... drafts
    where they were measured, for ``gamma="auto"``.
    """

    prompt_tokens: int
    new_tokens: int
    verify_steps: int
    accepted_histogram: list[int]
    acceptance_by_position: list[float]
    acceptance_length: float
    step_ms: float
    tpot_ms: float
    prefill_seconds: float
    first_token_seconds: float
    compile_seconds: float
    decode_seconds: float
    tokens_per_second: float
    step_costs: list[float] | None
    draft_cache_bytes: int
    target_cache_bytes: int
    recurrent_state_bytes: int


@dataclass(kw_only=True)
class Meter:
    """Collects what a run measures."""

    prompt_tokens: int
    rows: int
    gamma: int
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    compile_seconds: float = 0.0
    draft_cache_bytes: int = 0
    target_cache_bytes: int = 0
    recurrent_state_bytes: int = 0
    read_seconds: list[float] = field(default_factory=list)
    read_steps: list[int] = field(default_factory=list)
    step_costs: list[float] | None = None
    histogram: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.histogram = np.zeros(self.gamma + 1, np.int64)

    def add_read(self, seconds: float, emitted: Emitted) -> None:
        """Takes in one host read."""
        self.read_seconds.append(seconds)
        self.read_steps.append(int(emitted.steps))
        self.histogram += np.asarray(emitted.accepted)

    def stats(self, new_tokens: int) -> Stats:
        """The figures so far."""
        step_ms = [1000 * seconds / steps for seconds, steps in zip(self.read_seconds, self.read_steps, strict=True)]
        median_ms = statistics.median(step_ms) if step_ms else math.nan
        length = acceptance_length(self.histogram)
        decode_seconds = sum(self.read_seconds)
        return Stats(
            prompt_tokens=self.prompt_tokens,
            new_tokens=new_tokens,
            verify_steps=sum(self.read_steps),
            accepted_histogram=self.histogram.tolist(),
            acceptance_by_position=acceptance_by_position(self.histogram),
            acceptance_length=length,
            step_ms=median_ms,
            tpot_ms=median_ms / length,
            prefill_seconds=self.prefill_seconds,
            first_token_seconds=self.first_token_seconds,
            compile_seconds=self.compile_seconds,
            decode_seconds=decode_seconds,
            tokens_per_second=(new_tokens - self.rows) / decode_seconds if decode_seconds else math.nan,
            step_costs=self.step_costs,
            draft_cache_bytes=self.draft_cache_bytes,
            target_cache_bytes=self.target_cache_bytes,
            recurrent_state_bytes=self.recurrent_state_bytes,
        )


def acceptance_length(histogram: np.ndarray) -> float:
    """Mean accepted drafts a step, and one; NaN without steps."""
    steps = histogram.sum()
    return float(histogram @ np.arange(len(histogram)) / steps) + 1 if steps else math.nan


def acceptance_by_position(histogram: np.ndarray) -> list[float]:
    """For each draft, how often it was right among the steps whose earlier drafts were; NaN where there were none."""
    reached = np.cumsum(histogram[::-1])[::-1].tolist()
    return [right / tried if tried else math.nan for tried, right in itertools.pairwise(reached)]
