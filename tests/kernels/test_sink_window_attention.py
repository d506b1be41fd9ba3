"""Sink-window attention against a float64 oracle that keeps the whole cache and masks by definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sink_window_attention import ring_positions, ring_slot, sink_window_attention
from tests.kernels.oracles import attend, kept_positions
from tests.kernels.shapes import WINDOWS, Window

run = jax.jit(sink_window_attention, static_argnames=("sink", "implementation"))


def ring_case(case: Window, seed: int):
    """A ring filled position by position, as a row that lived through its whole context would have filled it."""
    rng = np.random.default_rng(seed)
    capacity = case.sink + case.window + case.spare
    heads = case.kv_heads * case.groups
    k_ring, v_ring = np.full((2, len(case.lengths), case.kv_heads, capacity, case.head_dim), 1e4)
    q = rng.standard_normal((len(case.lengths), 1, heads, case.head_dim)) * 2
    rows = []
    for row, length in enumerate(case.lengths):
        keys, values = rng.standard_normal((2, length + case.drafted, case.kv_heads, case.head_dim))
        rows.append((keys, values))
        for position in range(length + case.drafted):
            slot = position if position < case.sink else case.sink + (position - case.sink) % (capacity - case.sink)
            k_ring[row, :, slot], v_ring[row, :, slot] = keys[position], values[position]
    lengths = np.array(case.lengths)
    newest = (lengths + case.drafted - 1)[:, None]
    start = (lengths - case.window)[:, None]
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k_ring, v_ring)]
    return (*arrays, jnp.asarray(newest, jnp.int32), jnp.asarray(start, jnp.int32)), rows


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_draft_reads_the_sink_the_window_and_the_drafted(name, implementation):
    case = WINDOWS[name]
    inputs, rows = ring_case(case, seed=len(name))
    out = run(*inputs, case.sink, implementation=implementation)
    for row, (keys, values) in enumerate(rows):
        kept = kept_positions(case.lengths[row], case.lengths[row] + case.drafted - 1, case.window, case.sink)
        expected = attend(np.asarray(inputs[0][row, 0], np.float64), keys, values, kept)
        np.testing.assert_allclose(out[row, 0], expected, atol=2e-5, err_msg=f"row {row}")


def test_every_query_of_a_run_has_its_own_past():
    case = WINDOWS["wrapped many times"]
    (_, k_ring, v_ring, newest, start), rows = ring_case(case, seed=4)
    rng = np.random.default_rng(9)
    q = rng.standard_normal((len(rows), 3, case.kv_heads * case.groups, case.head_dim))
    positions = newest - jnp.asarray([2, 1, 0])
    out = run(jnp.asarray(q, jnp.float32), k_ring, v_ring, positions, jnp.tile(start, (1, 3)), case.sink)
    for row, (keys, values) in enumerate(rows):
        for t in range(3):
            kept = kept_positions(case.lengths[row], int(positions[row, t]), case.window, case.sink)
            np.testing.assert_allclose(out[row, t], attend(q[row, t], keys, values, kept), atol=2e-5)


@pytest.mark.parametrize(("sink", "capacity"), [(0, 1), (0, 7), (3, 4), (5, 19)])
def test_slots_and_positions_are_inverse_for_the_newest_holders(sink, capacity):
    held = np.full(capacity, -1)
    for position in range(4 * capacity):
        slot = int(ring_slot(jnp.asarray(position), sink, capacity))
        held[slot] = position
        shown = np.asarray(ring_positions(jnp.asarray([position]), sink, capacity))[0]
        reached = held >= 0
        np.testing.assert_array_equal(shown[reached], held[reached])
        assert np.all((shown[~reached] < 0) | (shown[~reached] > position))
