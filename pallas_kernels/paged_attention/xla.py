"""Portable form: a loop over pages with an online softmax, as many trips as the longest row has pages."""

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax


def paged_attention(q, k_pages, v_pages, page_table, lengths, k_scales=None, v_scales=None):
    tokens, (kv_heads, page) = q.shape[1], k_pages.shape[1:3]
    grouped = online_softmax.group_queries(q, kv_heads)
    last = jnp.tile(lengths[:, None] + jnp.arange(tokens), (1, q.shape[2] // kv_heads))

    def body(index, partial):
        rows = jax.lax.dynamic_index_in_dim(page_table, index, axis=1, keepdims=False)
        visible = index * page + jnp.arange(page) <= last[..., None]
        scales = (None if x is None else x[rows] for x in (k_scales, v_scales))
        return online_softmax.add(partial, grouped, k_pages[rows], v_pages[rows], visible, *scales)

    trips = jnp.minimum((jnp.max(lengths) + tokens + page - 1) // page, page_table.shape[1])
    partial = jax.lax.fori_loop(0, trips, body, online_softmax.start(grouped))
    return online_softmax.ungroup_queries(online_softmax.finish(partial), tokens).astype(q.dtype)
