"""Pallas Mosaic GPU (Hopper): a ring is one long page whose slots are listed with their positions."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels import online_softmax
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.mosaic_gpu.plan import KEYS
from pallas_kernels.mosaic_gpu.split_attention import split_attention
from pallas_kernels.sink_window_attention.slots import ring_positions


def sink_window_attention(q, k_ring, v_ring, positions, window_start, sink, *, splits=None, interpret: Any = None):
    rows, tokens = q.shape[:2]
    kv_heads, capacity = k_ring.shape[1:3]
    if capacity < KEYS:
        raise UnsupportedKernel(
            f"sink_window_attention: mosaic_gpu takes {KEYS} slots or more and got {capacity}; take 'xla'"
        )
    newest = jnp.max(positions, axis=1)
    groups = q.shape[2] // kv_heads
    out = split_attention(
        "sink_window_attention",
        online_softmax.group_queries(q, kv_heads),
        k_ring,
        v_ring,
        jnp.arange(rows, dtype=jnp.int32)[:, None],
        jnp.tile(positions, (1, groups)),
        held=_held(newest, sink, capacity),
        first=jnp.tile(window_start, (1, groups)),
        sink=sink,
        filled=jnp.minimum(newest + 1, capacity),
        splits=splits,
        interpret=interpret,
    )
    return online_softmax.ungroup_queries(out, tokens).astype(q.dtype)


def _held(newest, sink, capacity):
    """The position in each slot, a tile of keys a line: the last tile ends with the ring, and what it shares with the
    one before is empty there."""
    held = ring_positions(newest, sink, capacity).astype(jnp.int32)
    whole, rest = divmod(capacity, KEYS)
    tiles = held[:, : whole * KEYS].reshape(len(held), whole, KEYS)
    if rest:
        tail = jnp.pad(held[:, whole * KEYS :], [(0, 0), (KEYS - rest, 0)], constant_values=-1)
        tiles = jnp.concatenate([tiles, tail[:, None]], axis=1)
    return tiles
