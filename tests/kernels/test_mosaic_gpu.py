"""The Hopper kernels: interpreted on the CPU against float64 oracles, and lowered for an H200 that is not there."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels import gated_delta_rule as delta_rule_door
from pallas_kernels import paged_attention as paged_door
from pallas_kernels.gated_delta_rule.mosaic_gpu import gated_delta_rule
from pallas_kernels.mamba2_ssd.mosaic_gpu import mamba2_ssd
from pallas_kernels.mosaic_gpu.plan import MULTIPROCESSORS, make_plan
from pallas_kernels.mosaic_gpu.registers import bfloat16_parts
from pallas_kernels.paged_attention.mosaic_gpu import paged_attention
from pallas_kernels.sink_window_attention.mosaic_gpu import sink_window_attention
from tests.kernels.oracles import attend, kept_positions
from tests.kernels.shapes import (
    DELTAS,
    GPU_DELTAS,
    GPU_PAGED,
    GPU_STATE_SPACES,
    GPU_WINDOWS,
    PAGED,
    WINDOWS,
    Attention,
    Delta,
    StateSpace,
    Window,
)
from tests.kernels.test_gated_delta_rule import delta_case, on_device, oracle
from tests.kernels.test_mamba2_ssd import assert_follows, ssd_case
from tests.kernels.test_paged_attention import QUANTIZED, expected, paged_case, quantized
from tests.kernels.test_sink_window_attention import ring_case

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of JAX 0.10 knows no layouts of registers"
)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
HEAD_DIMS = (64, 128, 256)


def running(function, **options):
    """Interpreted, with races between copies, reads and writes found."""
    return jax.jit(partial(function, interpret=plgpu.InterpretGPUParams(detect_races=True), **options))


def rounded(x, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype), np.float64)


def taken(table: dict, takes) -> dict:
    return {name: case for name, case in table.items() if takes(case)}


PAGED_ROWS = GPU_PAGED | taken(PAGED, lambda case: case.head_dim in HEAD_DIMS and case.page % 64 == 0)
WINDOW_ROWS = GPU_WINDOWS | taken(
    WINDOWS, lambda case: case.head_dim in HEAD_DIMS and case.window + case.sink + case.spare >= 64
)
DELTA_ROWS = GPU_DELTAS | taken(DELTAS, lambda case: case.key_dim in HEAD_DIMS and case.value_dim % 64 == 0)


def dtypes_of(rows: dict) -> list[tuple[str, str]]:
    """Every row in bfloat16, and in float32 too where the shared memory of a multiprocessor holds it."""
    return [(name, "bfloat16") for name in rows] + [(n, "float32") for n in rows if rows[n].head_dim < 256]


@interpreted
@pytest.mark.parametrize(("name", "dtype"), dtypes_of(PAGED_ROWS))
def test_every_query_sees_its_own_past_and_nothing_else(name, dtype):
    case = PAGED_ROWS[name]
    (q, k_pages, v_pages, table, lengths), rows = paged_case(case, seed=len(name))
    arrays = [x.astype(dtype) for x in (q, k_pages, v_pages)]
    out = running(paged_attention, splits=2)(*arrays, table, lengths)
    rows = [tuple(rounded(x, dtype) for x in row) for row in rows]
    assert out.dtype == dtype
    assert out.shape == q.shape
    np.testing.assert_allclose(np.asarray(out, float), expected(case, rounded(q, dtype), rows), atol=TOLERANCE[dtype])


@interpreted
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_eight_bit_pages_mean_their_values_times_their_scales(kind, dtype):
    case = GPU_PAGED["mixed batch, pages half full"]
    (q, k_pages, v_pages, table, lengths), _ = paged_case(case, seed=5)
    q = q.astype(dtype)
    (k_pages, k_scales), (v_pages, v_scales) = (quantized(x, *QUANTIZED[kind]) for x in (k_pages, v_pages))
    out = running(paged_attention, splits=3)(q, k_pages, v_pages, table, lengths, k_scales, v_scales)
    held = []
    for row, length in enumerate(case.lengths):
        at = np.arange(length + case.tokens)
        where = (np.asarray(table)[row, at // case.page], slice(None), at % case.page)
        pools = ((k_pages, k_scales), (v_pages, v_scales))
        held.append(tuple((np.asarray(x, np.float64) * np.asarray(s)[..., None])[where] for x, s in pools))
    np.testing.assert_allclose(
        np.asarray(out, float), expected(case, rounded(q, "float32"), held), atol=TOLERANCE[dtype]
    )


@interpreted
def test_pages_past_a_rows_own_length_are_not_even_looked_up():
    """Their ids lie outside of the pool, where the interpreter refuses to read."""
    case = GPU_PAGED["mixed batch, pages half full"]
    (q, k_pages, v_pages, table, lengths), rows = paged_case(case, seed=2)
    counts = -(-(np.array(case.lengths) + case.tokens) // case.page)
    wide = np.full((len(counts), 9), 1000, np.int32)
    for row, count in enumerate(counts):
        wide[row, :count] = table[row, :count]
    out = running(paged_attention, splits=3)(q, k_pages, v_pages, wide, lengths)
    np.testing.assert_allclose(out, expected(case, np.asarray(q), rows), atol=2e-5)


@interpreted
@pytest.mark.parametrize(("name", "dtype"), dtypes_of(WINDOW_ROWS))
def test_a_draft_reads_the_sink_the_window_and_the_drafted(name, dtype):
    case = WINDOW_ROWS[name]
    (q, k_ring, v_ring, newest, start), rows = ring_case(case, seed=len(name))
    arrays = [x.astype(dtype) for x in (q, k_ring, v_ring)]
    out = running(sink_window_attention, sink=case.sink, splits=2)(*arrays, newest, start)
    assert out.dtype == dtype
    for row, sequences in enumerate(rows):
        committed = case.lengths[row]
        kept = kept_positions(committed, committed + case.drafted - 1, case.window, case.sink)
        keys, values = (rounded(x, dtype) for x in sequences)
        oracle_row = attend(rounded(q[row, 0], dtype), keys, values, kept)
        np.testing.assert_allclose(np.asarray(out[row, 0], float), oracle_row, atol=TOLERANCE[dtype])


@interpreted
def test_every_query_of_a_run_has_its_own_past_and_window():
    case = GPU_WINDOWS["wrapped many times, odd slots"]
    (_, k_ring, v_ring, newest, start), rows = ring_case(case, seed=4)
    q = np.random.default_rng(9).standard_normal((len(rows), 3, case.kv_heads * case.groups, case.head_dim))
    positions, starts = newest - jnp.asarray([2, 1, 0]), start + jnp.asarray([0, 1, 2])
    q = rounded(q, "float32")
    out = running(sink_window_attention, sink=case.sink, splits=1)(
        jnp.asarray(q, jnp.float32), k_ring, v_ring, positions, starts
    )
    for row, t in np.ndindex(len(rows), 3):
        visible = np.arange(int(positions[row, t]) + 1)
        visible = visible[(visible < case.sink) | (visible >= int(starts[row, t]))]
        np.testing.assert_allclose(out[row, t], attend(q[row, t], *rows[row], visible), atol=2e-5)


@interpreted
@pytest.mark.parametrize("name", DELTA_ROWS)
def test_the_recurrence_is_followed_token_for_token(name):
    case = DELTA_ROWS[name]
    inputs = delta_case(case, seed=len(name))
    out, state, corrected = running(gated_delta_rule)(*on_device(inputs))
    outputs, states = oracle(inputs)
    np.testing.assert_allclose(out, outputs, atol=5e-5)
    np.testing.assert_allclose(state, states[:, -1], atol=5e-5)
    _, k, v, log_decay, beta, begin = inputs
    before = np.concatenate([begin[:, None], states[:, :-1]], axis=1) * np.exp(log_decay)[..., None, None]
    read = np.einsum("bthkv,bthk->bthv", before, k)
    np.testing.assert_allclose(corrected, beta[..., None] * (v - read), atol=5e-5)


@interpreted
def test_repetitive_text_keeps_its_digits():
    inputs = delta_case(Delta(1, 40, 1, 64, 64), seed=3, parallel_keys=True, decay=0.01)
    out, state, _ = running(gated_delta_rule)(*on_device(inputs))
    outputs, states = oracle(inputs)
    np.testing.assert_allclose(out, outputs, atol=2e-5 * np.abs(outputs).max())
    np.testing.assert_allclose(state, states[:, -1], atol=2e-5 * np.abs(states).max())


@interpreted
@pytest.mark.parametrize("name", GPU_STATE_SPACES)
def test_state_space_duality_is_followed_token_for_token(name):
    case = GPU_STATE_SPACES[name]
    inputs = ssd_case(case, seed=len(name))
    out, state = running(mamba2_ssd)(*on_device(inputs))
    assert_follows(case, inputs, out, state)


def test_three_bfloat16_parts_are_the_number():
    x = jnp.asarray([1 / 3, -1e-20, 1e4 / 7, 2.0**-120, 0.0, np.nextafter(np.float32(2), 0)], jnp.float32)
    parts = jax.jit(bfloat16_parts)(x)
    assert all(part.dtype == jnp.bfloat16 for part in parts)
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in parts), np.asarray(x, np.float64))


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def paged_shapes(case: Attention, pages: int, q_dtype=jnp.bfloat16, dtype=jnp.bfloat16):
    rows, heads = len(case.lengths), case.kv_heads * case.groups
    pool = (rows * pages, case.kv_heads, case.page)
    scales = [shape(*pool, dtype=jnp.float32)] * 2 if jnp.dtype(dtype).itemsize == 1 else []
    ints = [shape(rows, pages, dtype=jnp.int32), shape(rows, dtype=jnp.int32)]
    queries = shape(rows, case.tokens, heads, case.head_dim, dtype=q_dtype)
    return [queries, *[shape(*pool, case.head_dim, dtype=dtype)] * 2, *ints, *scales]


def ring_shapes(case: Window, tokens: int):
    rows, slots = len(case.lengths), case.sink + case.window + case.spare
    ring = shape(rows, case.kv_heads, slots, case.head_dim)
    run = shape(rows, tokens, dtype=jnp.int32)
    return [shape(rows, tokens, case.kv_heads * case.groups, case.head_dim), ring, ring, run, run]


def delta_shapes(case: Delta):
    run, single = (case.rows, case.tokens, case.heads), partial(shape, dtype=jnp.float32)
    keys, values = single(*run, case.key_dim), single(*run, case.value_dim)
    return [keys, keys, values, single(*run), single(*run), single(case.rows, case.heads, case.key_dim, case.value_dim)]


def ssd_shapes(case: StateSpace):
    run, single = (len(case.valid), case.tokens), partial(shape, dtype=jnp.float32)
    read = single(*run, case.groups, case.size)
    state = single(run[0], case.heads, case.size, case.width)
    return [single(*run, case.heads, case.width), read, read, single(*run, case.heads), state]


VERIFY, MILLION = Attention((0,), 7, 2, 8, 256, 256), 4096
ring = partial(sink_window_attention, sink=64)
LOWERED = {
    "verify, pages of 64": (paged_attention, paged_shapes(VERIFY._replace(page=64), 4 * MILLION)),
    "verify, pages of 256, four rows": (paged_attention, paged_shapes(VERIFY._replace(lengths=(0,) * 4), MILLION)),
    "verify, int8": (paged_attention, paged_shapes(VERIFY, MILLION, dtype=jnp.int8)),
    "verify, float8": (paged_attention, paged_shapes(VERIFY, MILLION, dtype=jnp.float8_e4m3fn)),
    "prefill chunk": (paged_attention, paged_shapes(VERIFY._replace(tokens=512, page=128), MILLION)),
    "float32": (paged_attention, paged_shapes(VERIFY._replace(head_dim=128), 64, jnp.float32, jnp.float32)),
    "draft over the ring": (ring, ring_shapes(Window((0,), 0, 4032, 64, 6, 2, 8, 256), 1)),
    "draft-extend over a ring of tiles": (ring, ring_shapes(Window((0,), 0, 4032, 64, 8, 2, 8, 256), 7)),
    "native draft": (
        partial(sink_window_attention, sink=0),
        ring_shapes(Window((0,), 0, 131072, 0, 0, 2, 8, 256), 1),
    ),
    "delta rule, verify": (gated_delta_rule, delta_shapes(Delta(1, 7, 32, 128, 128))),
    "delta rule, chunk": (gated_delta_rule, delta_shapes(Delta(1, 512, 32, 128, 128))),
    "state-space duality, one token": (mamba2_ssd, ssd_shapes(StateSpace((1,), 1, 128, 8, 64, 128))),
    "state-space duality, verify": (mamba2_ssd, ssd_shapes(StateSpace((7, 7), 7, 128, 8, 64, 128))),
    "state-space duality, chunk": (mamba2_ssd, ssd_shapes(StateSpace((512,), 512, 128, 8, 64, 128))),
}


def h200():
    """What lowering for a GPU from a machine without one asks for."""
    try:
        from jax.sharding import AbstractDevice
    except ImportError:
        return contextlib.nullcontext()
    from jax.sharding import AbstractMesh, use_abstract_mesh

    device = AbstractDevice("NVIDIA H200", None, "cuda")  # pyright: ignore
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_an_h200(name):
    function, shapes = LOWERED[name]
    with h200():
        text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 66, 100])
def test_few_rows_fill_the_machine_and_many_leave_little_of_it_idle(rows):
    _, k, *_ = paged_shapes(VERIFY._replace(lengths=(0,) * rows), MILLION)
    grouped = shape(rows, 2, 56, 256)
    plan = make_plan("paged_attention", grouped, k, None, 1, 4 * MILLION, False, 0)
    blocks = plan.splits * rows * 2
    assert blocks / (-(-blocks // MULTIPROCESSORS) * MULTIPROCESSORS) > 0.9


REFUSED = {
    "head_dim of 64, 128 or 256 and got 96": (paged_attention, paged_shapes(VERIFY._replace(head_dim=96), 2)),
    "pages of a multiple of 64 tokens and got 48": (paged_attention, paged_shapes(VERIFY._replace(page=48), 2)),
    "head_dim=256 in float32": (paged_attention, paged_shapes(VERIFY, 2, jnp.float32, jnp.float32)),
    "keys must match or have eight bits": (paged_attention, paged_shapes(VERIFY, 2, jnp.float32)),
    "64 slots or more and got 40": (ring, ring_shapes(Window((0,), 0, 32, 4, 4, 2, 8, 256), 1)),
    "dk of 64, 128 or 256 and got 96": (gated_delta_rule, delta_shapes(Delta(1, 7, 2, 96, 128))),
    "dv of a multiple of 64 and got 96": (gated_delta_rule, delta_shapes(Delta(1, 7, 2, 128, 96))),
    "mamba2_ssd.* N of 64, 128 or 256 and got 16; take 'xla'": (
        mamba2_ssd,
        ssd_shapes(StateSpace((1,), 1, 2, 1, 64, 16)),
    ),
    "P of a multiple of 64 and got 48; take 'xla'": (mamba2_ssd, ssd_shapes(StateSpace((1,), 1, 2, 1, 48, 64))),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(why):
    function, shapes = REFUSED[why]
    with pytest.raises(ValueError, match=why):
        jax.eval_shape(function, *shapes)


@pytest.mark.parametrize("capability", ["7.5", "8.9", "10.0", "12.1", "gfx942"])
def test_another_gpu_is_refused_and_told_what_to_take(capability):
    with pytest.raises(ValueError, match=rf"mosaic_gpu.*9\.0 \(Hopper\).*{capability}: leave it out"):
        dispatch.require_capability("mosaic_gpu", capability)


@pytest.mark.parametrize("capability", ["9.0", ""])
def test_hopper_and_a_device_that_does_not_say_are_not(capability):
    dispatch.require_capability("mosaic_gpu", capability)


def test_a_machine_without_a_gpu_is_told_so():
    inputs, _ = paged_case(GPU_PAGED["first token of an empty row"], seed=0)
    with pytest.raises(ValueError, match="need a GPU and JAX found a CPU"):
        paged_door.paged_attention(*inputs, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="need a GPU and JAX found a CPU"):
        delta_rule_door.gated_delta_rule(*on_device(delta_case(DELTAS["one token"], 0)), implementation="mosaic_gpu")
