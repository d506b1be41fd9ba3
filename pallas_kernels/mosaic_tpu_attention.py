"""What the attention kernels for TPUs share: how queries are tiled, one block's online softmax, how splits combine.

A kernel instance holds one tile of a row's queries for all key heads and streams a share of the row's keys through
VMEM. The streaming is a loop inside the kernel and not a grid axis: a grid has as many steps for every row as for the
longest one, and empty steps cost about a third of a microsecond each.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.online_softmax import MASKED, Partial, finish, merge

LANES = 128
# Shares of the 16 MiB of VMEM that a kernel gets by default: one of four key and value buffers, and the rows of float32
# results that are kept for all key heads together.
_BUFFER_BYTES = 512 * 1024
_RESULT_ROWS = 1024
_WIDEST_TILE = 512
_WIDEST_BLOCK = 512
# One row alone must keep both cores of a chip busy; a prompt's many tiles do so anyway.
_SPLITS = 2


class Tiling(NamedTuple):
    """``rows`` queries an instance, in ``tiles`` tiles, over ``splits`` shares of the context."""

    rows: int
    tiles: int
    splits: int


def tile(queries: int, kv_heads: int, splits: int | None) -> Tiling:
    """How ``queries`` = T * G rows a key head are cut; the last tile is padded."""
    widest = max(16, min(_WIDEST_TILE, _RESULT_ROWS // kv_heads // 16 * 16))
    rows = min(widest, -(-queries // 16) * 16)
    tiles = -(-queries // rows)
    return Tiling(rows, tiles, splits or (_SPLITS if tiles == 1 else 1))


def block_width(kv_heads: int, size: int, dtype: jnp.dtype) -> int:
    """How many positions a buffer takes, a multiple of 128."""
    position = kv_heads * -(-size // LANES) * LANES * dtype.itemsize
    return max(LANES, min(_WIDEST_BLOCK, _BUFFER_BYTES // position // LANES * LANES))


def group_queries(x: Float[Array, "B T H D"], kv_heads: int, tiling: Tiling) -> Float[Array, "B K Q D"]:
    """All queries of a key head side by side, token by token so that a tile is a run of tokens; zeros at the end."""
    batch, tokens, heads, size = x.shape
    groups = heads // kv_heads
    grouped = x.reshape(batch, tokens, kv_heads, groups, size).swapaxes(1, 2)
    grouped = grouped.reshape(batch, kv_heads, tokens * groups, size)
    return jnp.pad(grouped, [(0, 0), (0, 0), (0, tiling.rows * tiling.tiles - tokens * groups), (0, 0)])


def ungroup_queries(x: Float[Array, "B K Q D"], tokens: int, heads: int) -> Float[Array, "B T H D"]:
    """The inverse of ``group_queries``."""
    batch, kv_heads, _, size = x.shape
    groups = heads // kv_heads
    split = x[:, :, : tokens * groups].reshape(batch, kv_heads, tokens, groups, size)
    return split.swapaxes(1, 2).reshape(batch, tokens, heads, size)


def ceil_div(a: Array, b: int) -> Array:
    """Of numbers that are not negative; JAX's ``//`` asks for signs, whose lowering depends on the chip."""
    return jax.lax.div(a + (b - 1), jnp.int32(b))


def share_of(blocks: Array, splits: int) -> tuple[Array, Array]:
    """The half-open range of blocks that this instance takes; grid axis 0 counts the splits."""
    share = ceil_div(blocks, splits)
    first = pl.program_id(0) * share
    return first, jnp.minimum(first + share, blocks)


def stream(first: Array, stop: Array, fetch: Callable, take: Callable) -> None:
    """``take(index, slot)`` for every block, while the next one is on its way into the other slot.

    ``fetch(index, slot, "start" | "wait")`` copies a block.
    """
    pl.when(first < stop)(lambda: fetch(first, 0, "start"))

    def body(index: Array, _: None) -> None:
        slot = jax.lax.rem(index - first, 2)
        pl.when(index + 1 < stop)(lambda: fetch(index + 1, 1 - slot, "start"))
        fetch(index, slot, "wait")
        take(index, slot)

    jax.lax.fori_loop(first, stop, body, None)


def clear(result: Partial) -> None:
    """No keys seen; the three references of a ``Partial`` are [K Q 1], [K Q 1] and [K Q D]."""
    maximum, total, weighted = result
    maximum[...] = jnp.full(maximum.shape, MASKED, jnp.float32)
    total[...] = jnp.zeros(total.shape, jnp.float32)
    weighted[...] = jnp.zeros(weighted.shape, jnp.float32)


def add(result: Partial, head: int, q: Array, k: Array, v: Array, visible: Array, scales: Sequence[Array] = ()) -> None:
    """Takes in a block [P D] of one head's keys and values for queries [Q D]; ``scales`` are rows [1 P] of 8-bit ones.

    ``visible`` [Q P] keeps whatever the keys hold elsewhere out of the result; values must be finite even there.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    over = {"preferred_element_type": jnp.float32, "precision": precision}
    scores = jax.lax.dot_general(q, k.astype(q.dtype), (((1,), (1,)), ((), ())), **over) * q.shape[-1] ** -0.5
    if scales:
        scores = scores * scales[0]
    scores = jnp.where(visible, scores, MASKED)
    maximum, total, weighted = result
    before = maximum[head]
    highest = jnp.maximum(before, scores.max(axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - highest), 0.0)
    faded = jnp.exp(before - highest)
    maximum[head] = highest
    total[head] = total[head] * faded + weights.sum(axis=-1, keepdims=True)
    if scales:
        weights = weights * scales[1]
    added = jax.lax.dot_general(weights.astype(q.dtype), v.astype(q.dtype), (((1,), (0,)), ((), ())), **over)
    weighted[head] = weighted[head] * faded + added


def run(
    kernel: Any,
    name: str,
    tiling: Tiling,
    scalars: Sequence[Array],
    queries: Sequence[Array],
    queries_specs: Sequence[pl.BlockSpec],
    caches: Sequence[Array],
    scratch: Sequence[Any],
    interpret: bool,
) -> Float[Array, "B K Q D"]:
    """Runs ``kernel`` over splits, rows and tiles and combines the splits; ``queries[0]`` is q [B K Q D].

    The kernel gets the scalars, then a tile of each of ``queries``, the caches where they lie in HBM, the references of
    a ``Partial`` and the scratch.
    """
    batch, kv_heads, padded, size = queries[0].shape
    grid = (tiling.splits, batch, tiling.tiles)

    def result(width: int) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        shape = jax.ShapeDtypeStruct((tiling.splits, batch, kv_heads, padded, width), jnp.float32)
        block = (None, None, kv_heads, tiling.rows, width)
        return shape, pl.BlockSpec(block, lambda split, row, at, *_: (split, row, 0, at, 0))

    shapes, specs = zip(result(1), result(1), result(size), strict=True)
    maximum, total, weighted = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[*queries_specs, *[pl.BlockSpec(memory_space=pl.ANY)] * len(caches)],
            out_specs=specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=pltpu.InterpretParams() if interpret else False,
        name=name,
    )(*scalars, *queries, *caches)
    return finish(merge(Partial(maximum[..., 0], total[..., 0], weighted)))


def tile_spec(kv_heads: int, tiling: Tiling, size: int) -> pl.BlockSpec:
    """A tile of q [B K Q D]."""
    return pl.BlockSpec((None, kv_heads, tiling.rows, size), lambda split, row, at, *_: (row, 0, at, 0))
