"""Paged attention against a float64 oracle, for every implementation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention
from tests.kernels.oracles import attend
from tests.kernels.shapes import PAGED, Attention

IMPLEMENTATIONS = ["reference", "xla"]
run = jax.jit(paged_attention, static_argnames="implementation")


def paged_case(case: Attention, seed: int):
    """Random keys and values scattered over shuffled pages; every slot that must not be read holds large garbage."""
    rng = np.random.default_rng(seed)
    heads = case.kv_heads * case.groups
    counts = [-(-(length + case.tokens) // case.page) for length in case.lengths]
    pool = rng.permutation(sum(counts) + 2)
    table = np.full((len(counts), max(counts)), pool[-1])
    shape = (len(pool), case.kv_heads, case.page, case.head_dim)
    k_pages, v_pages = np.full(shape, 1e4), np.full(shape, -1e4)
    q = rng.standard_normal((len(counts), case.tokens, heads, case.head_dim)) * 2
    rows, used = [], 0
    for row, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        table[row, :count] = pool[used : used + count]
        used += count
        keys, values = rng.standard_normal((2, length + case.tokens, case.kv_heads, case.head_dim))
        rows.append((keys, values))
        for position in range(length + case.tokens):
            at = (table[row, position // case.page], slice(None), position % case.page)
            k_pages[at], v_pages[at] = keys[position], values[position]
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k_pages, v_pages)]
    return (*arrays, jnp.asarray(table, jnp.int32), jnp.asarray(case.lengths, jnp.int32)), rows


def expected(case: Attention, q: np.ndarray, rows) -> np.ndarray:
    out = np.zeros(q.shape)
    for row, (keys, values) in enumerate(rows):
        for t in range(case.tokens):
            visible = np.arange(case.lengths[row] + t + 1)
            out[row, t] = attend(q[row, t].astype(np.float64), keys, values, visible)
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PAGED)
def test_every_query_sees_its_own_past_and_nothing_else(name, implementation):
    inputs, rows = paged_case(PAGED[name], seed=len(name))
    out = run(*inputs, implementation=implementation)
    chex.assert_equal_shape([out, inputs[0]])
    np.testing.assert_allclose(out, expected(PAGED[name], np.asarray(inputs[0]), rows), atol=2e-5)


def test_a_bfloat16_cache_costs_only_its_own_rounding():
    case = PAGED["batch mix, pages half full"]
    inputs, rows = paged_case(case, seed=1)
    q, k_pages, v_pages, table, lengths = inputs
    out = run(q.astype(jnp.bfloat16), *(x.astype(jnp.bfloat16) for x in (k_pages, v_pages)), table, lengths)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected(case, np.asarray(q), rows), atol=0.06)


QUANTIZED = {"int8": (jnp.int8, 127), "float8": (jnp.float8_e4m3fn, 448)}


def quantized(pages: jax.Array, dtype, largest: int):
    """Pages in eight bits and the scales that undo it; scales differ by position and head."""
    scales = jnp.abs(pages).max(axis=-1) / largest
    scaled = pages / jnp.maximum(scales, 1e-9)[..., None]
    return (jnp.round(scaled) if largest == 127 else scaled).astype(dtype), scales


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_eight_bit_pages_mean_their_values_times_their_scales(kind, implementation):
    case = PAGED["batch mix, pages half full"]
    (q, k_pages, v_pages, table, lengths), rows = paged_case(case, seed=5)
    (k_pages, k_scales), (v_pages, v_scales) = (quantized(x, *QUANTIZED[kind]) for x in (k_pages, v_pages))
    out = run(q, k_pages, v_pages, table, lengths, k_scales=k_scales, v_scales=v_scales, implementation=implementation)
    pools = [
        np.asarray(x, np.float64) * np.asarray(s)[..., None] for x, s in ((k_pages, k_scales), (v_pages, v_scales))
    ]
    held = []
    for row, (keys, _) in enumerate(rows):
        at = np.arange(len(keys))
        held.append(tuple(pool[np.asarray(table)[row, at // case.page], :, at % case.page] for pool in pools))
    np.testing.assert_allclose(out, expected(case, np.asarray(q), held), atol=2e-5)
    assert np.abs(out - expected(case, np.asarray(q), rows)).max() > 1e-3


def test_work_follows_the_true_length_and_not_the_allocated_one():
    case = PAGED["batch mix, pages half full"]
    (q, k_pages, v_pages, table, lengths), _ = paged_case(case, seed=2)
    # Pages past the true length may hold anything at all, NaN included: they are never touched.
    spoiled = jnp.concatenate([k_pages, jnp.full_like(k_pages[:1], jnp.nan)])
    wide = jnp.concatenate([table, jnp.full((len(case.lengths), 50), len(k_pages), jnp.int32)], axis=1)
    same = run(q, k_pages, v_pages, table, lengths)
    spoiled_too = jnp.concatenate([v_pages, jnp.full_like(v_pages[:1], jnp.nan)])
    np.testing.assert_allclose(run(q, spoiled, spoiled_too, wide, lengths), same, atol=1e-6)


def test_an_unknown_implementation_is_refused_by_name():
    inputs, _ = paged_case(PAGED["one token, first of all"], seed=0)
    with pytest.raises(ValueError, match=r"triton.*take one of.*xla"):
        paged_attention(*inputs, implementation="triton")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_portable_form_lowers_for_accelerators(platform):
    inputs, _ = paged_case(PAGED["batch mix, pages half full"], seed=3)
    text = jax.jit(paged_attention).trace(*inputs).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text
