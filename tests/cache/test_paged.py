"""Eight-bit pages: what they cost in precision, and that they change the text the same way whatever drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.cache.paged import allocate, default_page_size
from wmtp_jax.generation.options import CACHE_DTYPES
from wmtp_jax.generation.stream import generate
from wmtp_jax.model import Model

EIGHT_BIT = [dtype for dtype in CACHE_DTYPES if jnp.dtype(dtype).itemsize == 1]


def attended(dtype: str, seed: int) -> np.ndarray:
    """Three runs of a batch of two, stored and attended to in turn; one row's second run is not valid."""
    rng = np.random.default_rng(seed)
    config = CONFIGS["hybrid"]
    a = config.attention
    cache = allocate(config, [40, 23], 8, jnp.dtype(dtype))
    lengths, out = jnp.zeros(2, jnp.int32), []
    attend = jax.jit(lambda cache, *x: cache.attend(*x))
    for tokens, valid in ((5, [True, True]), (3, [True, False]), (9, [True, True])):
        q = rng.standard_normal((2, tokens, a.num_heads, a.head_dim)) * 2
        k, v = rng.standard_normal((2, 2, tokens, a.num_kv_heads, a.head_dim)) * rng.uniform(
            0.1, 20, (2, 1, tokens, 1, 1)
        )
        mask = jnp.broadcast_to(jnp.asarray(valid)[:, None], (2, tokens))
        arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
        result, cache = attend(cache, jnp.int32(1), *arrays, lengths, mask)
        out.append(np.asarray(result)[np.asarray(valid)].ravel())
        lengths = lengths + tokens * jnp.asarray(valid)
    return np.concatenate(out)


BOUNDS = {"float16": 0.002, "bfloat16": 0.02, "int8": 0.02, "float8_e4m3fn": 0.1}


@pytest.mark.parametrize(("dtype", "error"), BOUNDS.items())
def test_a_narrow_cache_stays_near_the_wide_one(dtype, error):
    exact, narrow = attended("float32", 3), attended(dtype, 3)
    off = np.linalg.norm(narrow - exact) / np.linalg.norm(exact)
    assert 1e-5 < off < error


def test_every_narrow_dtype_is_held_to_a_bound():
    assert {*BOUNDS, "float32"} == set(CACHE_DTYPES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_with_eight_bit_pages_too_the_text_does_not_depend_on_the_drafts(dtype):
    model = Model(decoder=tiny_model("hybrid", 7), config=CONFIGS["hybrid"])
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]]
    run = dict(max_new_tokens=24, cache_dtype=dtype, page_size=8, temperature=0.7, seed=5)
    plain = generate(model, prompts, gamma=0, **run)
    for window in (0, 4):
        assert generate(model, prompts, gamma=3, window=window, sink=min(2, window), **run).tokens == plain.tokens
    wide = generate(model, prompts, gamma=0, **{**run, "cache_dtype": "float32"})
    assert wide.stats.target_cache_bytes > 2 * plain.stats.target_cache_bytes


@pytest.mark.parametrize(("positions", "page"), [(1, 256), (2048, 256), (2049, 2048), (8192, 2048), (8193, 4096)])
def test_long_contexts_get_long_pages_on_a_cpu(positions, page):
    assert default_page_size(positions) == page
