"""What is drawn at a position, against numpy: filters, penalties, and noise that belongs to seed and position alone.

What these claims cover of what goes wrong in speculative decoders: temperatures that are silently greedy, greedy
decoding that is not reproducible, and penalties that drafted positions ignore.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from wmtp_jax.decode.sampling import History, Sampling, batch_sampling, choose, choose_run
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.errors import UserError

ROWS, VOCAB, RUN = 16, 13, 4
MANY = 4096
_choose, _choose_run = jax.jit(choose), jax.jit(choose_run)
seeds = st.integers(0, 2**32 - 1)
requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 5, 12, 13, 99]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.35, -0.2]),
    seed=seeds,
)
batches = st.lists(requests, min_size=ROWS, max_size=ROWS)


def sampling_of(rows: list[SamplingParams]) -> Sampling:
    """With every flag on, so that all examples share one program."""
    return replace(batch_sampling(rows), stochastic=True, filtered=True, penalized=True)


def drawn_logits(rng: np.random.Generator, shape: tuple[int, ...], ties: bool) -> np.ndarray:
    logits = 2.0 * rng.standard_normal(shape)
    return np.float32(np.round(logits) if ties else logits)


def drawn_history(rng: np.random.Generator) -> History:
    counts = rng.poisson(0.4, (ROWS, VOCAB))
    return History(jnp.asarray(rng.random((ROWS, VOCAB)) < 0.3), jnp.asarray(counts, jnp.int32))


def penalized(row: SamplingParams, logits: np.ndarray, in_prompt: np.ndarray, emitted: np.ndarray) -> np.ndarray:
    out = logits.astype(np.float64)
    for token in range(VOCAB):
        if in_prompt[token] or emitted[token]:
            out[token] *= row.repetition_penalty if out[token] <= 0 else 1 / row.repetition_penalty
        out[token] -= row.frequency_penalty * emitted[token]
        if emitted[token]:
            out[token] -= row.presence_penalty
    return out


def kept(row: SamplingParams, logits: np.ndarray) -> set[int]:
    """Tokens that the filters leave, from the best down; equals of the last of them stay too."""
    order = np.argsort(-logits, kind="stable")
    order = order[: row.top_k] if row.top_k else order
    mass = np.exp(logits[order] - logits[order[0]])
    mass /= mass.sum()
    last = 0
    for rank in range(1, len(order)):
        if mass[:rank].sum() >= row.top_p or mass[rank] < row.min_p * mass[0]:
            break
        last = rank
    return set(np.flatnonzero(logits >= logits[order[last]]).tolist())


def noise(seed: int, position: int) -> np.ndarray:
    key = jax.random.fold_in(jax.random.key(jnp.uint32(seed), impl="threefry2x32"), position)
    return np.asarray(_gumbel(key), np.float64)


_gumbel = jax.jit(partial(jax.random.gumbel, shape=(VOCAB,)))


def expected_choice(row, logits, position, in_prompt, emitted) -> int:
    logits = penalized(row, logits, in_prompt, emitted)
    if row.temperature == 0:
        return int(np.argmax(logits))
    scaled = np.float32(logits).astype(np.float64) / row.temperature
    scores = scaled + noise(row.seed, position)
    return max(kept(row, scaled), key=lambda token: scores[token])


@given(rows=batches, dice=st.integers(0, 2**20), ties=st.booleans())
@settings(max_examples=40)
def test_a_choice_is_the_best_noisy_logit_among_those_that_penalties_and_filters_leave(rows, dice, ties):
    rng = np.random.default_rng(dice)
    logits, history = drawn_logits(rng, (ROWS, VOCAB), ties), drawn_history(rng)
    positions = rng.integers(0, 2**20, ROWS).astype(np.int32)
    got = _choose(sampling_of(rows), logits, positions, history)
    for b, row in enumerate(rows):
        seen = np.asarray(history.in_prompt[b]), np.asarray(history.emitted[b])
        assert int(got[b]) == expected_choice(row, logits[b], int(positions[b]), *seen), (b, row)


@given(rows=batches, dice=st.integers(0, 2**20))
@settings(max_examples=20)
def test_penalties_inside_a_run_count_the_drafts_before_each_position_and_no_others(rows, dice):
    rng = np.random.default_rng(dice)
    logits, history = drawn_logits(rng, (ROWS, RUN, VOCAB), ties=False), drawn_history(rng)
    drafts = rng.integers(0, VOCAB, (ROWS, RUN - 1)).astype(np.int32)
    positions = rng.integers(0, 2**20, (ROWS, 1)).astype(np.int32) + np.arange(RUN, dtype=np.int32)
    got = _choose_run(sampling_of(rows), logits, positions, drafts, history)
    for b, row in enumerate(rows):
        emitted = np.array(history.emitted[b])
        for j in range(RUN):
            expected = expected_choice(
                row, logits[b, j], int(positions[b, j]), np.asarray(history.in_prompt[b]), emitted
            )
            assert int(got[b, j]) == expected, (b, j, row)
            if j < RUN - 1:
                emitted[drafts[b, j]] += 1


@given(rows=batches, dice=st.integers(0, 2**20))
@settings(max_examples=10)
def test_a_choice_does_not_depend_on_the_row_or_the_neighbors(rows, dice):
    rng = np.random.default_rng(dice)
    logits, history = drawn_logits(rng, (ROWS, VOCAB), ties=False), drawn_history(rng)
    positions = rng.integers(0, 2**20, ROWS).astype(np.int32)
    order = rng.permutation(ROWS)
    got = np.asarray(_choose(sampling_of(rows), logits, positions, history))
    moved = jax.tree.map(lambda x: x[order], (logits, positions, history))
    np.testing.assert_array_equal(_choose(sampling_of([rows[i] for i in order]), *moved), got[order])


def test_temperature_zero_is_the_argmax_whatever_the_seed_and_the_rest_of_the_batch():
    rng = np.random.default_rng(0)
    logits = drawn_logits(rng, (ROWS, VOCAB), ties=True)
    rows = [SamplingParams(temperature=float(b % 2), seed=b) for b in range(ROWS)]
    for seed in (0, 5, 2**32 - 1):
        cold = [replace(row, seed=seed) if row.temperature == 0 else row for row in rows]
        got = np.asarray(choose(batch_sampling(cold), logits, jnp.arange(ROWS), None))
        np.testing.assert_array_equal(got[::2], logits.argmax(axis=1)[::2])
    greedy = choose(batch_sampling([SamplingParams()] * ROWS), logits, jnp.arange(ROWS), None)
    np.testing.assert_array_equal(greedy, logits.argmax(axis=1))


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=1.0),
        dict(temperature=1.6),
        dict(temperature=1.0, top_k=5),
        dict(temperature=0.8, top_p=0.8),
        dict(temperature=1.0, min_p=0.1),
        dict(temperature=1.3, top_k=9, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_choices_over_seeds_and_over_positions_follow_the_filtered_softmax(params, by):
    """A greedy choice or one correlated from seed to seed would be far off. Seeds are neighbors on purpose."""
    params = SamplingParams(**params)
    logits = 0.2 * drawn_logits(np.random.default_rng(3), (VOCAB,), ties=False)
    count = np.arange(MANY, dtype=np.int32)
    seed = 7 + count if by == "seed" else np.full(MANY, 7)
    rows = batch_sampling([params] * MANY)
    rows = replace(rows, seed=jnp.asarray(seed, jnp.uint32), filtered=True)
    positions = np.full(MANY, 11, np.int32) if by == "seed" else count
    got = np.bincount(_choose(rows, np.tile(logits, (MANY, 1)), positions, None), minlength=VOCAB)
    scaled = logits.astype(np.float64) / params.temperature
    left = sorted(kept(params, scaled))
    expected = np.zeros(VOCAB)
    expected[left] = np.exp(scaled[left] - scaled.max())
    expected *= MANY / expected.sum()
    assert len(left) > 3
    assert got[expected == 0].sum() == 0
    assert stats.chisquare(got[left], expected[left]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_parameters_that_make_no_sense_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=field):
        SamplingParams(**{field: value})
