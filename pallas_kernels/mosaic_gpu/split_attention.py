"""Attention split over the context (flash-decoding): a block of threads a row, key head, query tile and share of keys.

A block keeps up to 64 queries of one key head in shared memory, streams its share of the keys and values past them by
TMA, two tiles ahead, and multiplies with ``wgmma``. float32 goes through the same tensor cores in three bfloat16 parts,
which is exact to float32 rounding where tf32 is not. The shares meet in ``online_softmax.merge``.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import online_softmax
from pallas_kernels.mosaic_gpu.plan import KEYS, ROWS, Plan, make_plan, tiled
from pallas_kernels.mosaic_gpu.registers import COMPILER_PARAMS, bfloat16_parts, load, transpose

_COLUMNS = 64
_WIDEST = 128
_LAYOUT = plgpu.Layout.WGMMA


def split_attention(
    op: str,
    q: Float[Array, "B K Q D"],
    k: Float[Array, "R K P D"],
    v: Float[Array, "R K P D"],
    table: Int[Array, "B n"],
    last: Int[Array, "B Q"],
    *,
    held: Int[Array, "B blocks 64"] | None = None,
    first: Int[Array, "B Q"] | None = None,
    sink: int = 0,
    filled: Int[Array, " B"] | None = None,
    k_scales: Float[Array, "R K P"] | None = None,
    v_scales: Float[Array, "R K P"] | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> Float[Array, "B K Q D"]:
    """Query (b, :, i) attends to the keys at positions up to ``last[b, i]`` in the pages ``table[b]``.

    Position p lies in page p // P at p % P, unless ``held`` lists the position in each slot (-1: none): then it also
    needs to be under ``sink`` or not before ``first[b, i]``, and slots from ``filled[b]`` on are not read.
    Raises ValueError for what the kernel cannot run.
    """
    count = q.shape[2]
    tiles = -(-count // ROWS)
    pad = [(0, 0), (0, tiles * ROWS - count)]
    last = jnp.pad(last, pad, constant_values=-1)
    ends = last.reshape(len(last), tiles, ROWS).max(axis=-1) + 1
    if filled is not None:
        ends = jnp.broadcast_to(filled[:, None], ends.shape)
    most_blocks = table.shape[1] * -(-k.shape[2] // KEYS)
    plan = make_plan(op, q, k, splits, tiles, most_blocks, held is not None, sink)
    queries = jnp.pad(q, [(0, 0), *pad, (0, 0)])
    inputs = {
        "q": jnp.stack(bfloat16_parts(queries)) if plan.query_parts == 3 else queries[None],
        "k": k,
        "v": v,
        "table": table,
        "last": last,
        "blocks": jnp.minimum((ends + KEYS - 1) // KEYS, most_blocks),
    }
    if held is not None and first is not None:
        inputs |= {"held": held, "first": jnp.pad(first, pad)}
    if plan.scaled:
        inputs |= {"k_scales": k_scales, "v_scales": v_scales}
    partials = online_softmax.Partial(*_launch(plan, inputs, interpret))
    return online_softmax.finish(online_softmax.merge(partials))[:, :, :count]


def _launch(plan: Plan, inputs: dict, interpret) -> tuple[jax.Array, ...]:
    """Maximum, total [S B K M] and weighted values [S B K M D] of every share."""
    shape = (plan.splits, plan.rows, plan.kv_heads, plan.query_tiles * ROWS)
    outputs = {"maximum": shape, "total": shape, "weighted": (*shape, plan.head_dim)}
    names = (*inputs, *outputs)

    def kernel(*refs):
        pl.run_scoped(partial(_block, plan, dict(zip(names, refs, strict=True))), **_scratch(plan))

    return plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in outputs.values()),
        grid=(plan.splits, plan.query_tiles, plan.rows * plan.kv_heads),
        grid_names=("split", "tile", "pair"),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )(*inputs.values())


def _scratch(plan: Plan) -> dict:
    size, stages = plan.head_dim, plan.stages
    if plan.aligned:
        raw = plgpu.SMEM((stages, KEYS, size), plan.key_dtype, transforms=tiled(plan.key_dtype))
    else:
        swizzle = (plgpu.SwizzleTransform(128),) if plan.key_dtype == jnp.bfloat16 else ()
        raw = plgpu.SMEM((stages, size // _COLUMNS, KEYS, _COLUMNS), plan.key_dtype, transforms=swizzle)
    copies = 1 if plan.aligned else size // _COLUMNS
    half = tiled(jnp.bfloat16)
    scratch = {
        "q_tile": plgpu.SMEM((plan.query_parts, ROWS, size), jnp.bfloat16, transforms=half),
        "weights": plgpu.SMEM((plan.query_parts, ROWS, KEYS), jnp.bfloat16, transforms=half),
        "raw": {"k": raw, "v": raw},
        "ready": {
            "q": plgpu.Barrier(num_arrivals=plan.query_parts),
            "k": plgpu.Barrier(num_arrivals=copies + plan.scaled + plan.listed, num_barriers=stages),
            "v": plgpu.Barrier(num_arrivals=copies + plan.scaled, num_barriers=stages),
        },
    }
    if not plan.direct:
        scratch["staged"] = plgpu.SMEM((plan.key_parts, KEYS, size), jnp.bfloat16, transforms=half)
    if plan.scaled:
        scratch["scales"] = {kind: plgpu.SMEM((stages, KEYS), jnp.float32) for kind in "kv"}
    if plan.listed:
        scratch["held"] = plgpu.SMEM((stages, KEYS), jnp.int32)
    return scratch


def _block(plan: Plan, gmem: dict, **smem):
    """What one block of threads does."""
    pair, tile, split = (lax.axis_index(name) for name in ("pair", "tile", "split"))
    row, head = lax.div(pair, jnp.int32(plan.kv_heads)), lax.rem(pair, jnp.int32(plan.kv_heads))
    total = gmem["blocks"][row, tile]
    share = lax.div(total + (plan.splits - 1), jnp.int32(plan.splits))
    begin = split * share
    end = jnp.minimum(begin + share, total)
    mine = pl.ds(tile * ROWS, ROWS)

    fill = partial(_fill, plan, gmem, smem, row, head)
    for part in range(plan.query_parts):
        plgpu.copy_gmem_to_smem(gmem["q"].at[part, row, head, mine], smem["q_tile"].at[part], smem["ready"]["q"])
    for slot in range(plan.stages):
        for kind in "kv":
            pl.when(begin + slot < end)(partial(fill, kind, begin + slot, slot))
    bounds = {name: _row_vector(gmem[name].at[row, mine]) for name in ("last", "first") if name in gmem}
    plgpu.barrier_wait(smem["ready"]["q"])

    def step(index, carry):
        slot = lax.rem(index - begin, jnp.int32(plan.stages))

        def refill(kind):
            @pl.when(index + plan.stages < end)
            def _():
                if not plan.direct or plan.listed:
                    plgpu.commit_smem()  # All have read the slot before the copy, another kind of access, fills it.
                fill(kind, index + plan.stages, slot)

        return _step(plan, smem, bounds, index, slot, refill, carry)

    maximum, total, weighted = lax.fori_loop(begin, end, step, _nothing_seen(plan))
    gmem["maximum"].at[split, row, head, mine][...] = maximum * math.log(2)
    gmem["total"].at[split, row, head, mine][...] = total
    for piece, values in enumerate(weighted):
        width = values.shape[1]
        gmem["weighted"].at[split, row, head, mine, pl.ds(piece * width, width)][...] = values


def _row_vector(ref):
    return load(ref, _LAYOUT.reduce(1), optimized=False)


def _nothing_seen(plan: Plan):
    """Maximum (of scores times log2 e), total and weighted values before the first key."""
    width = min(plan.head_dim, _WIDEST)

    def full(value, layout, *shape):
        return plgpu.layout_cast(jnp.full((ROWS, *shape), value, jnp.float32), layout)

    weighted = tuple(full(0.0, _LAYOUT, width) for _ in range(plan.head_dim // width))
    return full(online_softmax.MASKED, _LAYOUT.reduce(1)), full(0.0, _LAYOUT.reduce(1)), weighted


def _fill(plan: Plan, gmem, smem, row, head, kind: str, index, slot):
    """Starts the copies of key tile ``index`` of a row into ``slot``."""
    ready, raw = smem["ready"][kind].at[slot], smem["raw"][kind].at[slot]
    blocks = -(-plan.slots // KEYS)
    page = gmem["table"][row, lax.div(index, jnp.int32(blocks))]
    # The last tile of a page is moved back to end with it; in ``held``, slots it shares with the one before are empty.
    begin = jnp.minimum(lax.rem(index, jnp.int32(blocks)) * KEYS, plan.slots - KEYS)
    keys = pl.ds(begin, KEYS)
    if plan.aligned:
        begin = pl.multiple_of(begin, 8)
        plgpu.copy_gmem_to_smem(gmem[kind].at[page, head, keys], raw, ready)
    else:
        for group in range(plan.head_dim // _COLUMNS):
            columns = pl.ds(group * _COLUMNS, _COLUMNS)
            plgpu.copy_gmem_to_smem(gmem[kind].at[page, head, keys, columns], raw.at[group], ready)
    if plan.scaled:
        plgpu.copy_gmem_to_smem(gmem[f"{kind}_scales"].at[page, head, keys], smem["scales"][kind].at[slot], ready)
    if plan.listed and kind == "k":
        plgpu.copy_gmem_to_smem(gmem["held"].at[row, index], smem["held"].at[slot], ready)


def _step(plan: Plan, smem, bounds, index, slot, refill, carry):
    """One tile of keys: scores, the softmax so far, weighted values."""
    maximum, total, weighted = carry
    plgpu.barrier_wait(smem["ready"]["k"].at[slot])
    visible = _visible(plan, smem, bounds, index, slot)
    scores = _product(smem["q_tile"], _operands(plan, smem, "k", slot), KEYS, transpose)
    scores = scores * (plan.head_dim**-0.5 * math.log2(math.e))
    if plan.scaled:
        scores = scores * _across(load(smem["scales"]["k"].at[slot], _LAYOUT.reduce(0)), 1)
    refill("k")

    scores = jnp.where(visible, scores, online_softmax.MASKED)
    highest = jnp.maximum(maximum, scores.max(axis=1))
    weights = jnp.where(visible, jnp.exp2(scores - _across(highest, 0)), 0.0)
    old = jnp.exp2(maximum - highest)
    total = total * old + weights.sum(axis=1)

    plgpu.barrier_wait(smem["ready"]["v"].at[slot])
    if plan.scaled:
        weights = weights * _across(load(smem["scales"]["v"].at[slot], _LAYOUT.reduce(0)), 1)
    parts = bfloat16_parts(weights) if plan.query_parts == 3 else [weights.astype(jnp.bfloat16)]
    for part, values in enumerate(parts):
        smem["weights"].at[part][...] = values
    plgpu.commit_smem()
    values = _operands(plan, smem, "v", slot)
    updated = []
    # One piece after the other: two accumulators at once would not fit into the registers.
    for piece, sums in enumerate(weighted):
        columns = pl.ds(piece * sums.shape[1], sums.shape[1])
        added = _product(smem["weights"], values, sums.shape[1], lambda tile, at=columns: tile.at[:, at])
        updated.append(sums * _across(old, 0, sums.shape[1]) + added)
    refill("v")
    return highest, total, tuple(updated)


def _across(vector, axis: int, width: int = KEYS):
    """A value a row (axis 0) or a key (axis 1), along the other axis of a tile."""
    return lax.broadcast_in_dim(vector, (ROWS, width), (axis,))


def _visible(plan: Plan, smem, bounds, index, slot):
    if not plan.listed:
        positions = index * KEYS + plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=_LAYOUT)
        return positions <= _across(bounds["last"], 0)
    positions = plgpu.layout_cast(_across(load(smem["held"].at[slot], _LAYOUT.reduce(0)), 1), _LAYOUT)
    kept = (positions < plan.sink) | (positions >= _across(bounds["first"], 0))
    return (positions >= 0) & (positions <= _across(bounds["last"], 0)) & kept


def _operands(plan: Plan, smem, kind: str, slot) -> list:
    """The tile in ``slot`` as bfloat16 tiles whose sum it is."""
    raw = smem["raw"][kind].at[slot]
    if plan.direct:
        return [raw]
    staged = smem["staged"]
    for group in range(plan.head_dim // _COLUMNS):
        columns = pl.ds(group * _COLUMNS, _COLUMNS)
        piece = raw.at[:, columns] if plan.aligned else raw.at[group]
        values = load(piece, _LAYOUT, optimized=plan.aligned or plan.key_dtype == jnp.bfloat16)
        # There is no direct conversion from float8 to bfloat16.
        values = values.astype(jnp.float32)
        parts = bfloat16_parts(values) if plan.key_parts == 3 else [values.astype(jnp.bfloat16)]
        for part, half in enumerate(parts):
            staged.at[part, :, columns][...] = half
    plgpu.commit_smem()
    return [staged.at[part] for part in range(plan.key_parts)]


def _product(left, right: list, width: int, view):
    """The float32 product of two sums of bfloat16 tiles, without the terms under float32 rounding."""
    pairs = [(i, j) for i in range(left.shape[0]) for j in range(len(right)) if i + j < 3]

    def multiply(accumulator):
        for i, j in pairs:
            plgpu.wgmma(accumulator, left.at[i], view(right[j]))
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32))
