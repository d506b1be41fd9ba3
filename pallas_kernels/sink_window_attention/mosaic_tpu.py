"""Pallas kernel for TPUs: the filled slots of a row's ring stream through VMEM by double-buffered copies.

Copies cover whole blocks; what a capacity leaves over has buffers of its own, because a copy into a part of a buffer
must fill whole tiles of the memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu_attention as tpu
from pallas_kernels.online_softmax import Partial


class _Layout(NamedTuple):
    """Slots of the sink, of the whole ring and of a block."""

    sink: int
    capacity: int
    block: int

    @property
    def blocked(self) -> int:
        """Slots that lie in whole blocks."""
        return self.capacity // self.block * self.block


def sink_window_attention(
    q,
    k_ring,
    v_ring,
    positions,
    window_start,
    sink: int,
    *,
    splits: int | None = None,
    block: int | None = None,
    interpret: bool = False,
):
    """See the front door. ``splits`` and ``block`` (slots a step) override what the shapes suggest."""
    tokens, heads, size = q.shape[1:]
    kv_heads, capacity = k_ring.shape[1:3]
    computed = jnp.promote_types(q.dtype, k_ring.dtype)
    tiling = tpu.tile(tokens * heads // kv_heads, kv_heads, splits)
    layout = _Layout(sink, capacity, block or tpu.block_width(kv_heads, size, k_ring.dtype))
    bounds = [tpu.group_queries(_per_query(x, heads // kv_heads), 1, tiling)[:, 0] for x in (positions, window_start)]
    out = tpu.run(
        functools.partial(_kernel, layout=layout, splits=tiling.splits),
        "sink_window_attention",
        tiling,
        [positions.max(axis=1)],
        [tpu.group_queries(q.astype(computed), kv_heads, tiling), *bounds],
        [tpu.tile_spec(kv_heads, tiling, size), *[_bounds_spec(tiling)] * 2],
        [k_ring, v_ring],
        _scratch(k_ring, layout),
        interpret,
    )
    return tpu.ungroup_queries(out, tokens, heads).astype(q.dtype)


def _per_query(x, groups: int):
    """[B T] to [B T G 1]."""
    return jnp.broadcast_to(x[:, :, None, None], (*x.shape, groups, 1))


def _bounds_spec(tiling: tpu.Tiling) -> pl.BlockSpec:
    return pl.BlockSpec((None, tiling.rows, 1), lambda split, row, at, *_: (row, at, 0))


def _scratch(ring, layout: _Layout) -> list[Any]:
    kv_heads, size = ring.shape[1], ring.shape[3]
    block = (2, kv_heads, layout.block if layout.blocked else 8, size)
    rest = (kv_heads, layout.capacity - layout.blocked or 8, size)
    buffers: list[Any] = [pltpu.VMEM(shape, ring.dtype) for shape in (block, block, rest, rest)]
    return [*buffers, pltpu.SemaphoreType.DMA((3,))]


def _kernel(
    last,
    q,
    positions,
    window_start,
    k_ring,
    v_ring,
    maximum,
    total,
    weighted,
    k_block,
    v_block,
    k_rest,
    v_rest,
    arrived,
    *,
    layout: _Layout,
    splits: int,
):
    row = pl.program_id(1)
    result = Partial(maximum, total, weighted)
    filled = jnp.minimum(last[row] + 1, layout.capacity)
    first, stop = tpu.share_of(tpu.ceil_div(jnp.minimum(filled, layout.blocked), layout.block), splits)
    has_rest = (pl.program_id(0) == splits - 1) & (filled > layout.blocked)
    rings = (k_ring.at[row], v_ring.at[row])

    def copy(begin, size, targets, semaphore, action):
        for ring, target in zip(rings, targets, strict=True):
            source = ring.at[:, pl.ds(begin, size)]
            getattr(pltpu.make_async_copy(source, target, arrived.at[semaphore]), action)()

    def fetch(index, slot, action):
        begin = pl.multiple_of(index * layout.block, layout.block)
        copy(begin, layout.block, (k_block.at[slot], v_block.at[slot]), slot, action)

    def rest(action):
        copy(layout.blocked, layout.capacity - layout.blocked, (k_rest, v_rest), 2, action)

    def take(begin, keys, values):
        visible = _visible(begin, keys.shape[1], last[row], positions[...], window_start[...], layout)
        for head in range(q.shape[0]):
            tpu.add(result, head, q[head], keys[head], values[head], visible)

    tpu.clear(result)
    if layout.blocked < layout.capacity:
        pl.when(has_rest)(lambda: rest("start"))
    if layout.blocked:
        tpu.stream(
            first, stop, fetch, lambda index, slot: take(index * layout.block, k_block.at[slot], v_block.at[slot])
        )
    if layout.blocked < layout.capacity:

        @pl.when(has_rest)
        def _():
            rest("wait")
            take(layout.blocked, k_rest, v_rest)


def _visible(begin, size: int, last, positions, window_start, layout: _Layout):
    """[Q P]: the newest position up to ``last`` that a slot can hold is the one it holds, if it holds any."""
    slots = begin + jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    ring = layout.capacity - layout.sink
    behind = jax.lax.rem(last, ring) - jnp.where(slots < ring, slots, slots - ring)
    newest = last - jnp.where(behind < 0, behind + ring, behind)
    held = jnp.where(slots < layout.sink, slots, jnp.where(newest < layout.sink, -1, newest))
    return (held >= 0) & (held <= positions) & ((held < layout.sink) | (held >= window_start))
