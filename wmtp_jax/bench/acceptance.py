"""The arithmetic of acceptance: from what each step emitted to rates, lengths and their standard errors."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from wmtp_jax.generation.stats import acceptance_length

Statistic = Callable[[Int[np.ndarray, "..."]], float]


class Estimate(NamedTuple):
    """A figure and its standard error; NaN where it cannot be told."""

    value: float
    error: float


def accepted_by_step(runs: Sequence[int], new_tokens: int) -> list[int]:
    """Accepted drafts of each step that began before a row had ``new_tokens`` tokens.

    ``runs`` are the sizes of what a row emitted: the prompt's first token, then accepted + 1 a step. A row allowed to
    run to ``new_tokens + gamma`` tokens has none of these steps cut short by its limit.
    """
    accepted, emitted = [], runs[0]
    for run in runs[1:]:
        if emitted >= new_tokens:
            break
        accepted.append(run - 1)
        emitted += run
    return accepted


def histogram(accepted: Sequence[int], gamma: int) -> Int[np.ndarray, " N"]:
    """How many steps accepted 0 .. gamma drafts."""
    return np.bincount(np.asarray(accepted, np.int64), minlength=gamma + 1)


def estimate(prompts: Int[np.ndarray, "R ..."], statistic: Statistic) -> Estimate:
    """A statistic of all prompts' counts together, with its standard error over prompts.

    ``prompts`` has the counts of one prompt an entry, and ``statistic`` takes their sum. The error is the
    delete-one jackknife's (Efron and Stein, Annals of Statistics 9, 1981), which suits ratios of sums: prompts are
    independent of each other, the steps of one prompt are not.
    """
    total, count = prompts.sum(axis=0), len(prompts)
    value = statistic(total)
    if count < 2:
        return Estimate(value, math.nan)
    without = np.array([statistic(total - own) for own in prompts])
    return Estimate(value, float(np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())))


def length_difference(pair: Int[np.ndarray, "2 N"]) -> float:
    """The second histogram's acceptance length minus the first one's."""
    return acceptance_length(pair[1]) - acceptance_length(pair[0])


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two token sequences differ, or at which one of them ends; None where they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def repeated_share(tokens: Sequence[int], size: int = 4) -> float:
    """Of a text's runs of ``size`` tokens, the share that occurred in it before; NaN for a shorter text.

    Greedy text of a small model repeats itself, and repetition is easy to draft: a figure to read acceptance beside.
    """
    seen: set[tuple[int, ...]] = set()
    runs = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    repeats = 0
    for run in runs:
        repeats += run in seen
        seen.add(run)
    return repeats / len(runs) if runs else math.nan
