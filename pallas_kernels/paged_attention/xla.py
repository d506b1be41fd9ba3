"""Portable form: a loop over blocks of pages with an online softmax, as many trips as the longest row has blocks."""

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.bit_patterns import as_bits, as_floats

# Scores of one block stay in a CPU core's second-level cache: 2^18 float32 numbers.
_SCORES = 1 << 18
_SLICED_ROWS = 8


def paged_attention(q, k_pages, v_pages, page_table, lengths, k_scales=None, v_scales=None):
    tokens, (kv_heads, page) = q.shape[1], k_pages.shape[1:3]
    grouped = online_softmax.group_queries(q, kv_heads)
    last = jnp.tile(lengths[:, None] + jnp.arange(tokens), (1, q.shape[2] // kv_heads))
    size = _block_size(page, kv_heads * grouped.shape[2])
    k_pages, v_pages = as_bits(k_pages), as_bits(v_pages)

    def body(index, partial):
        begin = index * size
        pages = jax.lax.dynamic_index_in_dim(page_table, begin // page, axis=1, keepdims=False)
        k, v = (as_floats(_block(x, pages, begin % page, size)) for x in (k_pages, v_pages))
        scales = (x if x is None else _block(x, pages, begin % page, size) for x in (k_scales, v_scales))
        visible = begin + jnp.arange(size) <= last[..., None]
        return online_softmax.add(partial, grouped, k, v, visible, *scales)

    trips = jnp.minimum((jnp.max(lengths) + tokens + size - 1) // size, page_table.shape[1] * (page // size))
    partial = online_softmax.over_blocks(body, trips, online_softmax.start(grouped))
    return online_softmax.ungroup_queries(online_softmax.finish(partial), tokens).astype(q.dtype)


def _block_size(page: int, queries: int) -> int:
    """Positions a trip: the page, halved while its scores for all ``queries`` are too many for the cache."""
    size = page
    while size % 2 == 0 and size > 64 and size * queries > _SCORES:
        size //= 2
    return size


def _block(pages, owners, begin, size):
    """``size`` positions from ``begin`` of one page a row; [R K P ...] to [B K size ...]."""
    rest = pages.shape[3:]
    shape = (1, pages.shape[1], size, *rest)

    def cut(owner):
        return jax.lax.dynamic_slice(pages, (owner, 0, begin, *[0] * len(rest)), shape)

    # Slices are copied whole, a gather element by element; but a program grows by every slice in it.
    if len(owners) <= _SLICED_ROWS:
        return jnp.concatenate([cut(owner) for owner in owners])
    return jax.vmap(cut)(owners)[:, 0]
