"""What callers may rely on beyond the numbers: which memory is never looked at, what padding does, which dtypes go."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.sink_window_attention import sink_window_attention
from tests.kernels.oracles import attend, delta_rule, kept_positions

implementations = pytest.mark.parametrize("implementation", ["reference", "xla"])
dtypes = pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 2e-2)])


def held_by(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values that ``dtype`` has: both sides get the same numbers, so only the arithmetic may differ."""
    return np.asarray(jnp.asarray(x, dtype), np.float64)


@dtypes
@implementations
def test_pages_of_no_row_may_hold_nan_and_unread_slots_of_own_pages_anything_finite(implementation, dtype, tolerance):
    """A short row beside a long one: its table repeats its last page up to the length of the other's."""
    rng = np.random.default_rng(1)
    size, tokens, lengths = 8, 4, np.array([37, 5, 0])
    own = [[9, 2, 7, 4, 11, 1], [5, 0], [8]]
    table = np.array([[pages[min(i, len(pages) - 1)] for i in range(6)] for pages in own], np.int32)
    pools = np.full((2, 12, 2, size, 24), np.nan)
    pools[:, [page for pages in own for page in pages]] = 1e4
    sequences = [held_by(rng.standard_normal((2, length + tokens, 2, 24)), dtype) for length in lengths]
    for pages, sequence in zip(own, sequences, strict=True):
        for p in range(sequence.shape[1]):
            pools[:, pages[p // size], :, p % size] = sequence[:, p]
    q = held_by(2 * rng.standard_normal((3, tokens, 6, 24)), dtype)
    arrays = [jnp.asarray(x, dtype) for x in (q, *pools)]
    got = jax.jit(partial(paged_attention, implementation=implementation))(*arrays, table, lengths)
    assert got.dtype == dtype
    for row, t in np.ndindex(3, tokens):
        expected = attend(q[row, t], *sequences[row], np.arange(lengths[row] + t + 1))
        np.testing.assert_allclose(np.asarray(got[row, t], float), expected, atol=tolerance, rtol=tolerance)


@dtypes
@implementations
@pytest.mark.parametrize(("length", "window", "sink"), [(3, 7, 2), (29, 7, 2), (2300, 1200, 30)])
def test_slots_that_are_not_read_may_hold_anything_finite(length, window, sink, implementation, dtype, tolerance):
    """Two committed queries of a run, on rings of one block and of several."""
    rng = np.random.default_rng(length)
    slots = sink + window + 3
    sequence = held_by(rng.standard_normal((2, length, 2, 16)), dtype)
    ring = np.full((2, 1, 2, slots, 16), 1e4)
    for p in range(length):
        ring[:, 0, :, p if p < sink else sink + (p - sink) % (slots - sink)] = sequence[:, p]
    q = held_by(2 * rng.standard_normal((1, 2, 8, 16)), dtype)
    positions = np.array([[length - 2, length - 1]], np.int32)
    arrays = [jnp.asarray(x, dtype) for x in (q, *ring)]
    run = jax.jit(partial(sink_window_attention, sink=sink, implementation=implementation))
    got = run(*arrays, positions, positions - window + 1)
    assert got.dtype == dtype
    for t, newest in enumerate(positions[0]):
        expected = attend(q[0, t], *sequence, kept_positions(newest + 1, newest, window, sink))
        np.testing.assert_allclose(np.asarray(got[0, t], float), expected, atol=tolerance, rtol=tolerance)


@implementations
@pytest.mark.parametrize("kept", [0, 3, 66])
def test_padding_behind_a_prompt_leaves_its_state(kept, implementation):
    """Whatever keys and values the padded tokens have, and whether or not they begin inside a chunk."""
    rng = np.random.default_rng(kept)
    tokens, sizes = 70, (8, 6)
    q, k = rng.standard_normal((2, 1, tokens, 1, sizes[0]))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((1, tokens, 1, sizes[1]))
    log_decay, beta = -rng.uniform(0, 1, (1, tokens, 1)), rng.uniform(0, 1, (1, tokens, 1))
    state = rng.standard_normal((1, 1, *sizes))
    log_decay[:, kept:] = beta[:, kept:] = 0.0
    run = jax.jit(partial(gated_delta_rule, implementation=implementation))
    _, got, _ = run(*(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta, state)))
    parts = [x[0, :kept, 0] for x in (q, k, v, log_decay, beta)]
    expected = delta_rule(*parts, state[0, 0])[1][-1] if kept else state[0, 0]
    np.testing.assert_allclose(got[0, 0], expected, atol=5e-5)
