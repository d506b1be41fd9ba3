"""The TPU kernels: interpreted on the CPU against the float64 oracles, lowered for a TPU at the shapes of a model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import ShapeDtypeStruct as Shape

from pallas_kernels import gated_delta_rule as delta_door
from pallas_kernels import mamba2_ssd as ssd_door
from pallas_kernels import paged_attention as paged_door
from pallas_kernels import sink_window_attention as window_door
from pallas_kernels.gated_delta_rule.mosaic_tpu import gated_delta_rule
from pallas_kernels.mamba2_ssd.mosaic_tpu import mamba2_ssd
from pallas_kernels.paged_attention.mosaic_tpu import paged_attention
from pallas_kernels.sink_window_attention.mosaic_tpu import sink_window_attention
from tests.kernels.oracles import attend, delta_rule, kept_positions
from tests.kernels.shapes import DELTAS, PAGED, STATE_SPACES, WINDOWS, Attention
from tests.kernels.test_gated_delta_rule import delta_case, on_device, oracle
from tests.kernels.test_mamba2_ssd import assert_follows, ssd_case
from tests.kernels.test_paged_attention import QUANTIZED, expected, paged_case, quantized
from tests.kernels.test_sink_window_attention import ring_case


def interpreted(kernel, **options):
    """Compiled without optimization: each program runs once."""
    return jax.jit(partial(kernel, interpret=True, **options), compiler_options={"xla_backend_optimization_level": "0"})


def one_per(row_names, options):
    """The rows of a table, each with one of the ``options`` in turn."""
    return pytest.mark.parametrize(
        ("name", "options"),
        [(name, options[i % len(options)]) for i, name in enumerate(row_names)],
        ids=list(row_names),
    )


@one_per(PAGED, [{}, {"block": 16, "splits": 3}])
def test_every_query_sees_its_own_past_and_nothing_else(name, options):
    inputs, rows = paged_case(PAGED[name], seed=len(name))
    out = interpreted(paged_attention, **options)(*inputs)
    np.testing.assert_allclose(out, expected(PAGED[name], np.asarray(inputs[0]), rows), atol=2e-5)


def test_a_prompt_is_cut_into_tiles_of_queries():
    case = Attention((70, 0), 160, 2, 8, 32, 16)
    inputs, rows = paged_case(case, seed=1)
    out = interpreted(paged_attention, block=128)(*inputs)
    np.testing.assert_allclose(out, expected(case, np.asarray(inputs[0]), rows), atol=2e-5)


def test_a_split_may_have_no_key_at_all():
    """Seven splits of three blocks and of one."""
    case = Attention((170, 3), 2, 1, 3, 24, 16)
    inputs, rows = paged_case(case, seed=2)
    out = interpreted(paged_attention, splits=7, block=64)(*inputs)
    np.testing.assert_allclose(out, expected(case, np.asarray(inputs[0]), rows), atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("int8", PAGED["batch mix, pages half full"]),
        ("float8", PAGED["batch mix, pages half full"]),
        ("int8", Attention((700, 200), 2, 2, 2, 32, 512)),
    ],
    ids=["int8", "float8", "int8 in large pages"],
)
def test_eight_bit_pages_mean_their_values_times_their_scales(kind, case):
    """Small pages are fetched several at once, large ones in pieces."""
    (q, k_pages, v_pages, table, lengths), _ = paged_case(case, seed=5)
    (k_pages, k_scales), (v_pages, v_scales) = (quantized(x, *QUANTIZED[kind]) for x in (k_pages, v_pages))
    run = interpreted(paged_attention, block=128)
    out = run(q, k_pages, v_pages, table, lengths, k_scales, v_scales)
    pools = [
        np.asarray(x, np.float64) * np.asarray(s)[..., None] for x, s in ((k_pages, k_scales), (v_pages, v_scales))
    ]
    held = []
    for row, length in enumerate(case.lengths):
        at = np.arange(length + case.tokens)
        held.append(tuple(pool[np.asarray(table)[row, at // case.page], :, at % case.page] for pool in pools))
    np.testing.assert_allclose(out, expected(case, np.asarray(q), held), atol=2e-5)


def test_a_bfloat16_cache_costs_only_its_own_rounding():
    case = PAGED["batch mix, pages half full"]
    (q, k_pages, v_pages, *rest), rows = paged_case(case, seed=1)
    out = interpreted(paged_attention)(*(x.astype(jnp.bfloat16) for x in (q, k_pages, v_pages)), *rest)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected(case, np.asarray(q), rows), atol=0.06)


def test_pages_of_no_row_may_hold_nan():
    """A short row beside a long one: its table repeats its last page up to the length of the other's."""
    rng = np.random.default_rng(1)
    size, tokens, lengths = 8, 4, np.array([37, 5, 0])
    own = [[9, 2, 7, 4, 11, 1], [5, 0], [8]]
    table = np.array([[pages[min(i, len(pages) - 1)] for i in range(6)] for pages in own], np.int32)
    pools = np.full((2, 12, 2, size, 24), np.nan)
    pools[:, [page for pages in own for page in pages]] = 1e4
    sequences = [rng.standard_normal((2, length + tokens, 2, 24)) for length in lengths]
    for pages, sequence in zip(own, sequences, strict=True):
        for p in range(sequence.shape[1]):
            pools[:, pages[p // size], :, p % size] = sequence[:, p]
    q = 2 * rng.standard_normal((3, tokens, 6, 24))
    got = interpreted(paged_attention)(*(jnp.asarray(x, jnp.float32) for x in (q, *pools)), table, lengths)
    for row, t in np.ndindex(3, tokens):
        seen = attend(q[row, t], *sequences[row], np.arange(lengths[row] + t + 1))
        np.testing.assert_allclose(got[row, t], seen, atol=2e-5)


def test_pages_past_the_true_length_are_not_fetched():
    """The interpreter refuses to copy from outside of the pool, which is where the rest of the table points."""
    case = Attention((5, 17, 40), 2, 1, 2, 16, 8)
    (q, k_pages, v_pages, table, lengths), rows = paged_case(case, seed=3)
    owned = -(-(np.array(case.lengths) + case.tokens) // case.page)
    wide = np.pad(np.asarray(table), [(0, 0), (0, 20)])
    wide[np.arange(wide.shape[1]) >= owned[:, None]] = 10**6
    out = interpreted(paged_attention)(q, k_pages, v_pages, jnp.asarray(wide), lengths)
    np.testing.assert_allclose(out, expected(case, np.asarray(q), rows), atol=2e-5)


@one_per(WINDOWS, [{}, {"block": 8, "splits": 3}])
def test_a_draft_reads_the_sink_the_window_and_the_drafted(name, options):
    case = WINDOWS[name]
    inputs, rows = ring_case(case, seed=len(name))
    out = interpreted(sink_window_attention, sink=case.sink, **options)(*inputs)
    for row, (keys, values) in enumerate(rows):
        kept = kept_positions(case.lengths[row], case.lengths[row] + case.drafted - 1, case.window, case.sink)
        seen = attend(np.asarray(inputs[0][row, 0], np.float64), keys, values, kept)
        np.testing.assert_allclose(out[row, 0], seen, atol=2e-5, err_msg=f"row {row}")


@pytest.mark.parametrize(("length", "window", "sink"), [(29, 7, 2), (700, 300, 30)])
def test_every_query_of_a_run_has_its_own_past_and_its_own_window(length, window, sink):
    """Committed queries in bfloat16; what they do not read is large."""
    rng = np.random.default_rng(length)
    slots, tokens = sink + window + 3, 3
    sequence = np.asarray(jnp.asarray(rng.standard_normal((2, length, 2, 16)), jnp.bfloat16), np.float64)
    ring = np.full((2, 1, 2, slots, 16), 1e4)
    for p in range(length):
        ring[:, 0, :, p if p < sink else sink + (p - sink) % (slots - sink)] = sequence[:, p]
    q = np.asarray(jnp.asarray(2 * rng.standard_normal((1, tokens, 6, 16)), jnp.bfloat16), np.float64)
    positions = np.arange(length - tokens, length, dtype=np.int32)[None]
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, *ring)]
    got = interpreted(sink_window_attention, sink=sink, block=128)(*arrays, positions, positions - window + 1)
    assert got.dtype == jnp.bfloat16
    for t, newest in enumerate(positions[0]):
        seen = attend(q[0, t], *sequence, kept_positions(newest + 1, newest, window, sink))
        np.testing.assert_allclose(np.asarray(got[0, t], float), seen, atol=2e-2, rtol=2e-2)


def test_blocks_past_the_filled_part_of_a_full_cache_are_not_read():
    rng = np.random.default_rng(6)
    lengths, capacity = (30, 70), 150
    sequences = [rng.standard_normal((2, length, 2, 16)) for length in lengths]
    cache = np.full((2, len(lengths), 2, capacity, 16), np.nan)
    for row, (length, sequence) in enumerate(zip(lengths, sequences, strict=True)):
        cache[:, row, :, : -(-length // 16) * 16] = 1e4
        cache[:, row, :, :length] = sequence.swapaxes(1, 2)
    q = rng.standard_normal((len(lengths), 1, 4, 16))
    newest = jnp.asarray(lengths, jnp.int32)[:, None] - 1
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, *cache)]
    got = interpreted(sink_window_attention, sink=0, block=16)(*arrays, newest, jnp.zeros_like(newest))
    for row, sequence in enumerate(sequences):
        np.testing.assert_allclose(got[row, 0], attend(q[row, 0], *sequence, np.arange(lengths[row])), atol=2e-5)


@pytest.mark.parametrize("name", DELTAS)
def test_the_recurrence_is_followed_token_for_token(name):
    inputs = delta_case(DELTAS[name], seed=len(name))
    out, state, corrected = interpreted(gated_delta_rule)(*on_device(inputs))
    outputs, states = oracle(inputs)
    np.testing.assert_allclose(out, outputs, atol=5e-5)
    np.testing.assert_allclose(state, states[:, -1], atol=5e-5)
    _, k, _, log_decay, _, before = inputs
    previous = np.concatenate([before[:, None], states[:, :-1]], axis=1)
    # What a step adds to the faded state is k u^T, and keys have unit length.
    added = states - np.exp(log_decay)[..., None, None] * previous
    np.testing.assert_allclose(corrected, np.einsum("bthk,bthkv->bthv", k, added), atol=5e-5)


@pytest.mark.parametrize("name", ["longest verified run", "several chunks"])
def test_repetitive_text_keeps_its_digits(name):
    inputs = delta_case(DELTAS[name], seed=3, parallel_keys=True, decay=0.01)
    out, state, _ = interpreted(gated_delta_rule)(*on_device(inputs))
    outputs, states = oracle(inputs)
    np.testing.assert_allclose(out, outputs, atol=2e-5 * np.abs(outputs).max())
    np.testing.assert_allclose(state, states[:, -1], atol=2e-5 * np.abs(states).max())


def test_strong_decay_neither_overflows_nor_leaks():
    inputs = delta_case(DELTAS["one chunk"], seed=5, decay=200.0)
    out, state, _ = interpreted(gated_delta_rule)(*on_device(inputs))
    outputs, states = oracle(inputs)
    np.testing.assert_allclose(out, outputs, atol=5e-5)
    np.testing.assert_allclose(state, states[:, -1], atol=5e-5)


def test_padding_behind_a_prompt_leaves_its_state():
    inputs = delta_case(DELTAS["several chunks"], seed=4)
    for gate in inputs[3:5]:
        gate[:, 66:] = 0.0
    _, state, _ = interpreted(gated_delta_rule)(*on_device(inputs))
    for head in range(state.shape[1]):
        parts = [x[0, :66, head] for x in inputs[:5]]
        np.testing.assert_allclose(state[0, head], delta_rule(*parts, inputs[5][0, head])[1][-1], atol=5e-5)


@pytest.mark.parametrize(
    "name",
    [
        "one token, empty row",
        "two tokens, a group a head",
        "more heads a group than run together",
        "longest verified run",
        "several chunks",
    ],
)
def test_state_space_duality_is_followed_token_for_token(name):
    case = STATE_SPACES[name]
    inputs = ssd_case(case, seed=len(name))
    assert_follows(case, inputs, *interpreted(mamba2_ssd)(*on_device(inputs)))


def test_strong_decay_costs_state_space_duality_no_digits():
    """Nor does it overflow; every other token hardly decays."""
    case = STATE_SPACES["one past a chunk"]
    inputs = ssd_case(case, seed=5, decay=200.0)
    inputs[3][:, ::2] /= 200.0
    assert_follows(case, inputs, *interpreted(mamba2_ssd)(*on_device(inputs)))


def paged_shapes(kind: str, tokens: int, page: int, size: int = 256):
    """A row of 128K and its neighbor in the shape of a 35B's attention: 16 query heads on 2 key heads of 256."""
    width = 131072 // page
    pool = (10 * 2 * width, 2, page, size)
    q = Shape((2, tokens, 16, size), jnp.float32 if kind == "float32" else jnp.bfloat16)
    shapes = [q, *[Shape(pool, kind)] * 2, Shape((2, width), jnp.int32), Shape((2,), jnp.int32)]
    return shapes + [Shape(pool[:3], jnp.float32)] * 2 * (jnp.dtype(kind).itemsize == 1)


def lowered(kernel, *shapes):
    return jax.export.export(jax.jit(kernel), platforms=["tpu"])(*shapes).mlir_module()


@pytest.mark.parametrize("page", [64, 256])
@pytest.mark.parametrize("tokens", [7, 512])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_paged_attention_lowers_for_a_tpu(kind, tokens, page):
    assert "tpu_custom_call" in lowered(paged_attention, *paged_shapes(kind, tokens, page))


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("capacity", "sink"), [(64 + 4032 + 6, 64), (131072, 0)])
def test_sink_window_attention_lowers_for_a_tpu(capacity, sink, tokens):
    ring, at = Shape((2, 2, capacity, 256), jnp.bfloat16), Shape((2, tokens), jnp.int32)
    shapes = (Shape((2, tokens, 16, 256), jnp.bfloat16), ring, ring, at, at)
    assert "tpu_custom_call" in lowered(partial(sink_window_attention, sink=sink), *shapes)


@pytest.mark.parametrize("tokens", [7, 512])
def test_the_gated_delta_rule_lowers_for_a_tpu(tokens):
    vectors, gate = Shape((2, tokens, 32, 128), jnp.float32), Shape((2, tokens, 32), jnp.float32)
    state = Shape((2, 32, 128, 128), jnp.float32)
    assert "tpu_custom_call" in lowered(gated_delta_rule, vectors, vectors, vectors, gate, gate, state)


def ssd_shapes(tokens: int, heads: int = 128, groups: int = 8, width: int = 64, size: int = 128):
    read, gate = Shape((2, tokens, groups, size), jnp.float32), Shape((2, tokens, heads), jnp.float32)
    state = Shape((2, heads, size, width), jnp.float32)
    return Shape((2, tokens, heads, width), jnp.float32), read, read, gate, state


@pytest.mark.parametrize(("tokens", "groups"), [(1, 8), (9, 128), (512, 8), (512, 1)])
def test_state_space_duality_lowers_for_a_tpu(tokens, groups):
    assert "tpu_custom_call" in lowered(mamba2_ssd, *ssd_shapes(tokens, groups=groups))


@pytest.mark.parametrize(
    ("kind", "page", "size", "reason"),
    [
        ("bfloat16", 24, 256, "multiple of 16 positions, not 24"),
        ("int8", 48, 256, "multiple of 32 positions, not 48"),
        ("float32", 6000, 256, "at most 2048 positions or a multiple of 128, not 6000"),
        ("bfloat16", 64, 64, "head dimension that is a multiple of 128, not 64"),
    ],
)
def test_pages_that_a_tpu_cannot_copy_are_refused_with_the_reason(kind, page, size, reason):
    with pytest.raises(ValueError, match=f"paged_attention: mosaic_tpu.*{reason}"):
        lowered(paged_attention, *paged_shapes(kind, 1, page, size))


@pytest.mark.parametrize(
    ("door", "case"),
    [
        (paged_door.paged_attention, lambda: paged_case(PAGED["wide heads"], seed=0)[0]),
        (window_door.sink_window_attention, lambda: (*ring_case(WINDOWS["on the edge"], seed=0)[0], 4)),
        (delta_door.gated_delta_rule, lambda: on_device(delta_case(DELTAS["verified run"], seed=0))),
        (ssd_door.mamba2_ssd, lambda: on_device(ssd_case(STATE_SPACES["verified run"], seed=0))),
    ],
    ids=["paged_attention", "sink_window_attention", "gated_delta_rule", "mamba2_ssd"],
)
@pytest.mark.skipif(jax.default_backend() == "tpu", reason="on a TPU the name runs")
def test_the_name_is_refused_where_there_is_no_tpu(door, case):
    with pytest.raises(ValueError, match=r"mosaic_tpu.*need a TPU"):
        door(*case(), implementation="mosaic_tpu")
