"""A recurrence over tokens, its state in registers from the first token to the last.

The columns of dv never meet, so a block of threads takes 64 of them of one row and head, and nothing is exchanged
between blocks. What a token sums over dk it sums within quads of threads, without a barrier. Queries, keys and values
arrive by TMA, one batch of tokens ahead.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.mosaic_gpu.registers import COMPILER_PARAMS, load, transpose

COLUMNS = 64
"""Columns of dv a block: the rows of its transposed state."""

BATCH = 32
"""Tokens a copy."""

_KEY_DIMS = (64, 128, 256)
_LAYOUT = plgpu.Layout.WGMMA_TRANSPOSED


class _Plan(NamedTuple):
    step: Callable
    rows: int
    tokens: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int

    @property
    def batch(self) -> int:
        return min(BATCH, self.tokens)

    @property
    def batches(self) -> int:
        return self.tokens // self.batch


def recur(
    step: Callable,
    q: Float[Array, "B T G dk"],
    k: Float[Array, "B T G dk"],
    v: Float[Array, "B T H dv"],
    log_decay: Float[Array, "B T H"],
    *writes: Float[Array, "B T H"],
    state: Float[Array, "B H dk dv"],
    results: int,
    interpret: Any = None,
) -> tuple[list[Float[Array, "B T H dv"]], Float[Array, "B H dk dv"]]:
    """Takes ``step`` for every token; returns its ``results`` and the state after all.

    ``step(state, q, k, v, decay, *writes)`` sees the transposed state [dv dk] of one head and returns the next one and
    a tuple of vectors over dv. A padded token has zeros everywhere and must leave the state as it is.
    """
    tokens = v.shape[1]
    # A batch of copied tokens is whole.
    spare = -tokens % BATCH if tokens > BATCH else 0
    q, k, v, decay, *others = (
        jnp.pad(x.astype(jnp.float32), [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))
        for x in (q, k, v, log_decay, *writes)
    )
    rows, padded, heads, value_dim = v.shape
    groups, key_dim = k.shape[2:]
    plan = _Plan(step, rows, padded, heads, groups, key_dim, value_dim)
    gates = [x.swapaxes(1, 2) for x in (jnp.exp(decay), *others)]
    final, *outs = _launch(plan, q, k, v, *gates, state, results=results, interpret=interpret)
    return [out[:, :tokens] for out in outs], final


def check(op: str, keys: tuple[str, int], values: tuple[str, int]) -> None:
    """Raises UnsupportedKernel for sizes, each with its name, that the kernel does not take."""
    if keys[1] not in _KEY_DIMS:
        raise UnsupportedKernel(f"{op}: mosaic_gpu takes {keys[0]} of 64, 128 or 256 and got {keys[1]}; take 'xla'")
    if values[1] % COLUMNS:
        raise UnsupportedKernel(
            f"{op}: mosaic_gpu takes {values[0]} of a multiple of {COLUMNS} and got {values[1]}; take 'xla'"
        )


def along(vector, state, axis: int):
    """A vector over dv (axis 0) or dk (axis 1) along the other axis of the transposed state."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, state.shape, (axis,)), _LAYOUT)


def _launch(plan: _Plan, *inputs, results, interpret):
    def kernel(*refs):
        pl.run_scoped(
            partial(_block, plan, refs[: len(inputs)], refs[len(inputs) :]),
            {"q": _tokens_of(plan, plan.key_dim), "k": _tokens_of(plan, plan.key_dim), "v": _tokens_of(plan, COLUMNS)},
            plgpu.Barrier(num_arrivals=3, num_barriers=2),
        )

    values = jax.ShapeDtypeStruct((plan.rows, plan.tokens, plan.heads, plan.value_dim), jnp.float32)
    state = jax.ShapeDtypeStruct((plan.rows, plan.heads, plan.key_dim, plan.value_dim), jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=(state, *[values] * results),
        grid=(plan.value_dim // COLUMNS, plan.heads, plan.rows),
        grid_names=("slice", "head", "row"),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )(*inputs)


def _tokens_of(plan: _Plan, size: int):
    return plgpu.SMEM((2, plan.batch, size), jnp.float32)


def _block(plan: _Plan, inputs, outputs, smem, ready):
    """One row, head and slice of columns through all tokens."""
    (q, k, v, *gates, begin), (final, *outs) = inputs, outputs
    piece, head, row = (lax.axis_index(name) for name in ("slice", "head", "row"))
    group = lax.div(head, jnp.int32(plan.heads // plan.groups))
    columns = pl.ds(piece * COLUMNS, COLUMNS)

    def fill(batch, slot):
        tokens = pl.ds(batch * plan.batch, plan.batch)
        plgpu.copy_gmem_to_smem(q.at[row, tokens, group], smem["q"].at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(k.at[row, tokens, group], smem["k"].at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(v.at[row, tokens, head, columns], smem["v"].at[slot], ready.at[slot])

    for ahead in range(min(2, plan.batches)):
        fill(ahead, ahead)

    def through_batch(batch, held):
        slot = lax.rem(batch, jnp.int32(2))
        plgpu.barrier_wait(ready.at[slot])

        def through_token(index, held):
            token = batch * plan.batch + index
            q_t, k_t = (load(smem[x].at[slot, index], _LAYOUT.reduce(0)) for x in "qk")
            v_t = load(smem["v"].at[slot, index], _LAYOUT.reduce(1))
            held, results = plan.step(held, q_t, k_t, v_t, *(gate[row, head, token] for gate in gates))
            for out, result in zip(outs, results, strict=True):
                out.at[row, token, head, columns][...] = result
            return held

        held = lax.fori_loop(0, plan.batch, through_token, held)

        @pl.when(batch + 2 < plan.batches)
        def _():
            plgpu.commit_smem()  # All have read the slot before the copy, another kind of memory access, fills it.
            fill(batch + 2, slot)

        return held

    held = load(transpose(begin.at[row, head, :, columns]), _LAYOUT, optimized=False)
    held = lax.fori_loop(0, plan.batches, through_batch, held)
    transpose(final.at[row, head, :, columns])[...] = held
