"""Pallas kernel for TPUs: the pages of a row stream through VMEM by double-buffered copies, as many as it really has.

A buffer takes several small pages, or a piece of a large one, so that copies are long whatever the page size.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu_attention as tpu
from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.online_softmax import Partial

# Two buffers each of keys and of values, all key heads together, must fit into VMEM.
_LARGEST_COPY = 2048


class _Layout(NamedTuple):
    """Page size, positions a copy, copies a block, table width, queries that share a key head, tokens."""

    page: int
    piece: int
    pieces: int
    table: int
    groups: int
    tokens: int


def paged_attention(
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    k_scales=None,
    v_scales=None,
    *,
    splits: int | None = None,
    block: int | None = None,
    interpret: bool = False,
):
    """See the front door. ``splits`` and ``block`` (positions a step) override what the shapes suggest.

    Raises ValueError for pages that cannot be copied in whole tiles of the memory.
    """
    tokens, heads, size = q.shape[1:]
    kv_heads, page = k_pages.shape[1:3]
    pools = [k_pages, v_pages] if k_scales is None else [k_pages, v_pages, k_scales, v_scales]
    computed = q.dtype if len(pools) == 4 else jnp.promote_types(q.dtype, k_pages.dtype)
    tiling = tpu.tile(tokens * heads // kv_heads, kv_heads, splits)
    width = block or tpu.block_width(kv_heads, size, k_pages.dtype)
    piece = _piece(page, width)
    if not interpret:
        _check(page, piece, size, k_pages.dtype)
    layout = _Layout(page, piece, max(1, width // piece), page_table.shape[1], heads // kv_heads, tokens)
    out = tpu.run(
        functools.partial(_kernel, layout=layout, splits=tiling.splits),
        "paged_attention",
        tiling,
        [lengths],
        [tpu.group_queries(q.astype(computed), kv_heads, tiling), page_table[:, None]],
        [tpu.tile_spec(kv_heads, tiling, size), _table_spec(layout)],
        pools,
        _scratch(pools, layout),
        interpret,
    )
    return tpu.ungroup_queries(out, tokens, heads).astype(q.dtype)


def _piece(page: int, width: int) -> int:
    """How much of a page one copy takes: all of it if it fits, else a divisor that keeps the lanes of scales whole."""
    whole = math.gcd(page, width // tpu.LANES * tpu.LANES)
    return page if page <= width or whole % tpu.LANES else whole


def _check(page: int, piece: int, size: int, dtype) -> None:
    """Other shapes would be laid out in another order or padded, and so copied whole before every call."""
    needs = f"paged_attention: mosaic_tpu needs {dtype} pages with"
    rows = 32 // dtype.itemsize
    if size % tpu.LANES:
        raise UnsupportedKernel(f"{needs} a head dimension that is a multiple of {tpu.LANES}, not {size}; take None")
    if page % rows:
        raise UnsupportedKernel(f"{needs} a multiple of {rows} positions, not {page}; take another page size or None")
    if piece > _LARGEST_COPY:
        raise UnsupportedKernel(f"{needs} at most {_LARGEST_COPY} positions or a multiple of {tpu.LANES}, not {page}")


def _table_spec(layout: _Layout) -> pl.BlockSpec:
    # One row of the table at a time: all of it, for many rows of a million tokens, is more than SMEM holds.
    return pl.BlockSpec((None, 1, layout.table), lambda split, row, *_: (row, 0, 0), memory_space=pltpu.SMEM)


def _scratch(pools, layout: _Layout) -> list[Any]:
    kv_heads, size = pools[0].shape[1], pools[0].shape[3]
    whole = (2, kv_heads, layout.piece * layout.pieces, size)
    buffers: list[Any] = [pltpu.VMEM(whole, pool.dtype) for pool in pools[:2]]
    # Copies into a run of lanes must fill whole registers, which scales of a small page do not: one row each instead.
    rows = (2, layout.pieces, kv_heads, layout.piece)
    buffers += [pltpu.VMEM(rows, pool.dtype) for pool in pools[2:]]
    return [*buffers, pltpu.SemaphoreType.DMA((2,))]


def _kernel(lengths, q, table, *refs, layout: _Layout, splits: int):
    pools = refs[: (len(refs) - 4) // 2]
    result = Partial(*refs[len(pools) : len(pools) + 3])
    buffers, arrived = refs[len(pools) + 3 : -1], refs[-1]
    row, at = pl.program_id(1), pl.program_id(2)
    tile_rows = q.shape[1]
    newest = jnp.minimum(tpu.ceil_div((at + 1) * tile_rows, layout.groups), layout.tokens) - 1
    end = jnp.minimum(lengths[row] + newest + 1, layout.table * layout.page)
    needed = tpu.ceil_div(end, layout.piece)
    first, stop = tpu.share_of(tpu.ceil_div(needed, layout.pieces), splits)
    tpu.clear(result)
    # The last block is fetched in part, and a weight of zero does not silence what an unwritten value may be.
    for values in buffers[1::2]:
        values[...] = jnp.zeros(values.shape, values.dtype)

    def take(index, slot):
        visible = _visible(index, at * tile_rows, tile_rows, lengths[row], end, layout)
        for head in range(q.shape[0]):
            scales = [_scales(buffer, slot, head) for buffer in buffers[2:]]
            tpu.add(result, head, q[head], buffers[0][slot, head], buffers[1][slot, head], visible, scales)

    tpu.stream(first, stop, functools.partial(_fetch, table, pools, buffers, arrived, needed, layout), take)


def _fetch(table, pools, buffers, arrived, needed, layout: _Layout, block, slot, action: str) -> None:
    """Starts the copies of a block's pieces into ``slot`` of the buffers, or waits for them."""

    def body(index, _):
        begin = (block * layout.pieces + index) * layout.piece
        page, offset = table[0, jax.lax.div(begin, layout.page)], jax.lax.rem(begin, layout.page)
        for number, (pool, buffer) in enumerate(zip(pools, buffers, strict=True)):
            source = pool.at[page]
            if layout.piece < layout.page:
                source = source.at[:, pl.ds(pl.multiple_of(offset, layout.piece), layout.piece)]
            into = pl.ds(pl.multiple_of(index * layout.piece, layout.piece), layout.piece)
            target = buffer.at[slot, :, into] if number < 2 else buffer.at[slot, index]
            getattr(pltpu.make_async_copy(source, target, arrived.at[slot]), action)()

    jax.lax.fori_loop(0, jnp.minimum(layout.pieces, needed - block * layout.pieces), body, None)


def _visible(block, first_query, tile_rows: int, length, end, layout: _Layout):
    """[Q P]: query row r belongs to token r // G, which sees positions up to its own."""
    width = layout.piece * layout.pieces
    positions = block * width + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    query = first_query + jax.lax.broadcasted_iota(jnp.int32, (tile_rows, 1), 0)
    # position - length <= query // G, without a division.
    return ((positions - length) * layout.groups <= query) & (positions < end)


def _scales(buffer, slot, head: int):
    """[1 P] of one key head."""
    return jnp.concatenate([buffer[slot, piece, head : head + 1] for piece in range(buffer.shape[1])], axis=1)
