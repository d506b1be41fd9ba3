"""Planned bytes are the bytes that decoding allocates."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import CONFIGS
from wmtp_jax.cache.paged import allocate
from wmtp_jax.decode.drafter import MTPDrafter
from wmtp_jax.decode.prefill import start_state
from wmtp_jax.models.decoder import abstract
from wmtp_jax.plan.hardware import HARDWARE
from wmtp_jax.plan.memory import PAGE, RESERVE, row_bytes, rows_that_fit, weight_bytes
from wmtp_jax.plan.sizes import sizes_of_config
from wmtp_jax.plan.source import read_sizes

DTYPES = {"float32": jnp.float32, "bf16": jnp.bfloat16}


def nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ["hybrid", "experts", "mamba", "attention", "recurrent"])
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("context", [1, PAGE, 3 * PAGE + 1])
def test_a_row_holds_what_is_allocated(name: str, dtype: str, context: int) -> None:
    config, rows = CONFIGS[name], 2
    model = abstract(config, DTYPES[dtype])
    gamma, window, sink = 5, 37, 3
    planned = row_bytes(sizes_of_config(config), dtype, dtype, context=context, gamma=gamma, window=window, sink=sink)
    pages = allocate(config, [context] * rows, PAGE, DTYPES[dtype])
    capacity = pages.table.shape[1] * PAGE
    assert rows * planned.pages == nbytes((pages.keys, pages.values))
    assert rows * planned.state == nbytes(model.initial_states(rows))
    native = MTPDrafter(gamma=gamma).start(model, rows, capacity, DTYPES[dtype])
    ring = MTPDrafter(gamma=gamma, window=window, sink=sink).start(model, rows, capacity, DTYPES[dtype])
    assert rows * planned.draft_native == nbytes(native)
    assert rows * planned.draft_ring == nbytes(ring)


def test_a_window_that_covers_the_pages_is_the_native_cache() -> None:
    sizes = sizes_of_config(CONFIGS["hybrid"])
    covered, wrapped = (
        row_bytes(sizes, "bf16", "bf16", context=2 * PAGE, gamma=4, window=window, sink=11)
        for window in (2 * PAGE - 11, 2 * PAGE - 12)
    )
    assert covered.draft_ring == covered.draft_native
    assert wrapped.draft_ring == wrapped.draft_native + 2 * sizes.num_kv_heads * sizes.head_dim * 2 * 2


@pytest.mark.parametrize(("cache", "dtype"), [("int8", jnp.int8), ("fp8", jnp.float8_e4m3fn)])
def test_eight_bit_pages_come_with_a_float32_scale_a_position_and_head(cache: str, dtype: jnp.dtype) -> None:
    config = CONFIGS["hybrid"]
    cached = allocate(config, [PAGE + 7], PAGE, dtype)
    scales = jnp.zeros(cached.keys.shape[:3], jnp.float32)
    planned = row_bytes(sizes_of_config(config), "bf16", cache, context=PAGE + 7, gamma=1, window=0, sink=0)
    assert planned.pages == nbytes((cached.keys, cached.values, scales, scales))


@given(st.integers(0, 2**40), st.integers(1, 2**36), st.integers(0, 2**36), st.floats(1e9, 1e13), st.floats(0, 1e13))
def test_more_memory_and_smaller_rows_never_fit_fewer(
    weights: int, ring: int, more: int, memory: float, extra: float
) -> None:
    small, large = (dataclasses.replace(HARDWARE["h200"], memory_bytes=size) for size in (memory, memory + extra))
    assert rows_that_fit(small, weights, ring + more) <= rows_that_fit(large, weights, ring + more)
    fitting = rows_that_fit(small, weights, ring)
    assert rows_that_fit(small, weights, ring + more) <= fitting
    usable = memory * (1 - RESERVE) - weights
    assert fitting * ring <= max(usable, 0) < max((fitting + 1) * ring, 1)


@pytest.mark.parametrize("name", ["qwen3_6_35b", "qwen3_5_122b", "nemotron_3_super"])
@pytest.mark.parametrize("hardware", sorted(HARDWARE))
def test_the_ring_never_fits_fewer_rows(name: str, hardware: str) -> None:
    sizes = read_sizes(name)
    weights = sum(weight_bytes(sizes, "nvfp4", draft=draft) for draft in (False, True))
    fitting = []
    for context in (2**10, 2**16, 2**20):
        row = row_bytes(sizes, "nvfp4", "bf16", context=context, gamma=6, window=4032, sink=64)
        native, windowed = (rows_that_fit(HARDWARE[hardware], weights, size) for size in (row.native, row.windowed))
        assert windowed >= native
        fitting.append(windowed)
    assert fitting == sorted(fitting, reverse=True)
    if hardware == "h200":
        assert fitting[-1] > 0


def test_a_memory_smaller_than_the_weights_fits_nothing() -> None:
    assert rows_that_fit(HARDWARE["tpu-v5e"], 17 * 10**9, 5) == 0


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", jnp.bfloat16), ("float32", jnp.float32)])
@pytest.mark.parametrize(
    ("cache", "cached"), [("int8", jnp.int8), ("fp8", jnp.float8_e4m3fn), ("float16", jnp.float16)]
)
def test_the_draft_cache_is_planned_in_the_dtype_that_decoding_gives_it(weights, dtype, cache, cached):
    model = abstract(CONFIGS["hybrid"], dtype)
    drafter = MTPDrafter(gamma=3, window=20, sink=2)
    make = partial(
        start_state, model, drafter, [range(2 * PAGE - 9)], [5], page_size=PAGE, dtype=cached, penalized=False
    )
    state = jax.eval_shape(make)
    row = row_bytes(sizes_of_config(CONFIGS["hybrid"]), weights, cache, context=2 * PAGE, gamma=3, window=20, sink=2)
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.draft)) == row.draft_ring
