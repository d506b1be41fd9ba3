"""Acceptance rates, lengths and standard errors against counts of raw steps."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmtp_jax.bench.acceptance import (
    accepted_by_step,
    estimate,
    first_difference,
    histogram,
    length_difference,
    repeated_share,
)
from wmtp_jax.generation.stats import acceptance_by_position, acceptance_length

GAMMA = 4
STEPS = st.lists(st.integers(0, GAMMA), min_size=1, max_size=30)
PROMPTS = st.lists(STEPS, min_size=2, max_size=5)


def histograms(prompts: list[list[int]]) -> np.ndarray:
    return np.stack([histogram(steps, GAMMA) for steps in prompts])


@given(PROMPTS)
def test_rates_and_length_are_those_of_a_count_over_all_steps(prompts: list[list[int]]) -> None:
    steps = list(itertools.chain(*prompts))
    counts = histograms(prompts)
    assert estimate(counts, acceptance_length).value == pytest.approx(sum(steps) / len(steps) + 1)
    for j in range(GAMMA):
        reached = [accepted for accepted in steps if accepted >= j]
        right = [accepted for accepted in reached if accepted > j]
        rate = estimate(counts, lambda total, j=j: acceptance_by_position(total)[j]).value
        assert rate == pytest.approx(len(right) / len(reached) if reached else math.nan, nan_ok=True)


@given(PROMPTS)
def test_length_is_one_and_the_products_of_the_rates(prompts: list[list[int]]) -> None:
    rates = [rate for rate in acceptance_by_position(histograms(prompts).sum(axis=0)) if not math.isnan(rate)]
    length = 1 + sum(math.prod(rates[: j + 1]) for j in range(len(rates)))
    assert estimate(histograms(prompts), acceptance_length).value == pytest.approx(length)


@given(st.lists(st.lists(st.integers(0, GAMMA), min_size=6, max_size=6), min_size=2, max_size=7))
def test_error_of_equally_long_prompts_is_the_standard_error_of_their_means(prompts: list[list[int]]) -> None:
    means = np.mean(prompts, axis=1)
    expected = np.std(means, ddof=1) / math.sqrt(len(means))
    assert estimate(histograms(prompts), acceptance_length).error == pytest.approx(expected)


def test_error_of_unequal_prompts_is_the_jackknife_worked_by_hand() -> None:
    # All: 9 accepted in 6 steps. Without the first: 5 in 2, without the second: 5 in 5, without the third: 8 in 5.
    found = estimate(histograms([[1, 0, 3, 0], [4], [1]]), acceptance_length)
    without = np.array([2.5, 1.0, 1.6])
    assert found.value == 2.5
    assert found.error == pytest.approx(math.sqrt(2 / 3 * ((without - without.mean()) ** 2).sum()))


def test_one_prompt_has_no_error_and_no_steps_have_no_rate() -> None:
    found = estimate(histograms([[2, 1]]), acceptance_length)
    assert found.value == 2.5
    assert math.isnan(found.error)
    assert math.isnan(estimate(np.zeros((2, 3), int), acceptance_length).value)


@given(PROMPTS, st.integers(0, 2**32 - 1))
def test_a_difference_is_that_of_the_lengths_and_of_equal_drafters_exactly_zero(
    prompts: list[list[int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    others = [rng.integers(0, GAMMA + 1, len(steps) + 2).tolist() for steps in prompts]
    a, b = histograms(prompts), histograms(others)
    found = estimate(np.stack([a, b], axis=1), length_difference)
    means = [np.mean(list(itertools.chain(*steps))) for steps in (prompts, others)]
    assert found.value == pytest.approx(means[1] - means[0])
    assert estimate(np.stack([a, a], axis=1), length_difference) == (0.0, 0.0)


@given(st.lists(st.integers(0, GAMMA), min_size=60, max_size=60), st.integers(2, 50))
def test_steps_count_whole_though_the_row_ends_within_one(accepted: list[int], new_tokens: int) -> None:
    limit, runs = new_tokens + GAMMA, [1]
    for step in accepted:
        runs.append(min(step + 1, limit - sum(runs)))
        if sum(runs) == limit:
            break
    before = itertools.accumulate([1, *accepted], lambda tokens, step: tokens + step + 1)
    begun = [step for step, tokens in zip(accepted, before, strict=False) if tokens < new_tokens]
    assert accepted_by_step(runs, new_tokens) == begun


@pytest.mark.parametrize(
    ("left", "right", "index"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([4, 5], [], 0), ([], [], None)],
)
def test_the_first_difference_is_found(left: list[int], right: list[int], index: int | None) -> None:
    assert first_difference(left, right) == index
    assert first_difference(right, left) == index


def test_only_runs_seen_before_count_as_repeated() -> None:
    assert repeated_share([1, 2, 3, 4, 5, 6]) == 0.0
    assert repeated_share([7, 7, 7, 7, 7, 7]) == pytest.approx(2 / 3)
    assert repeated_share([1, 2, 9, 1, 2, 1, 2], size=2) == pytest.approx(2 / 6)
    assert math.isnan(repeated_share([1, 2, 3]))
