"""Portable form: one pass over a small ring, or a loop over blocks of a large one with an online softmax."""

import jax
import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.bit_patterns import as_bits, as_floats
from pallas_kernels.sink_window_attention.slots import ring_positions

BLOCK = 4096


def sink_window_attention(q, k_ring, v_ring, positions, window_start, sink):
    tokens, (kv_heads, capacity) = q.shape[1], k_ring.shape[1:3]
    grouped = online_softmax.group_queries(q, kv_heads)
    groups = q.shape[2] // kv_heads
    last = jnp.max(positions, axis=1)
    held = ring_positions(last, sink, capacity)[:, None, :]
    visible = (held >= 0) & (held <= positions[..., None]) & ((held < sink) | (held >= window_start[..., None]))
    visible = jnp.tile(visible, (1, groups, 1))
    # A window somewhat past one block is cheaper in one pass than in two overlapping ones.
    size = capacity if capacity < 2 * BLOCK else BLOCK

    stored = as_bits(k_ring), as_bits(v_ring)

    def body(index, partial):
        # The last block is moved back to end with the ring; slots it shares with the block before are masked.
        begin = jnp.minimum(index * size, capacity - size)
        k, v = (as_floats(jax.lax.dynamic_slice_in_dim(x, begin, size, axis=2)) for x in stored)
        fresh = begin + jnp.arange(size) >= index * size
        mask = jax.lax.dynamic_slice_in_dim(visible, begin, size, axis=2) & fresh
        return online_softmax.add(partial, grouped, k, v, mask)

    partial = online_softmax.start(grouped)
    if size == capacity:
        partial = online_softmax.add(partial, grouped, k_ring, v_ring, visible)
    else:
        filled = jnp.minimum(jnp.max(last) + 1, capacity)
        partial = online_softmax.over_blocks(body, (filled + size - 1) // size, partial)
    return online_softmax.ungroup_queries(online_softmax.finish(partial), tokens).astype(q.dtype)
