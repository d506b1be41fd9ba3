"""Pallas Mosaic GPU (Hopper): the recurrence as written, its state in registers from the first token to the last.

The columns of dv never meet, so a block of threads takes 64 of them of one row and head, and nothing is exchanged
between blocks. A token costs two sums over dk within quads of threads and no barrier: by count of instructions some
400 cycles, 0.1 ms for a chunk of 512, whatever the number of rows up to the width of the machine. The chunked form on
tensor cores needs six bfloat16 products for one in float32, inverts in blocks far below a tile of 64, and its chunks
remain sequential: at best twice as fast by the same count, with more rounding. Queries, keys and values arrive by TMA,
one batch of tokens ahead.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.mosaic_gpu.registers import COMPILER_PARAMS, load, transpose

COLUMNS = 64
"""Columns of dv a block: the rows of its transposed state."""

BATCH = 32
"""Tokens a copy."""

_KEY_DIMS = (64, 128, 256)
_LAYOUT = plgpu.Layout.WGMMA_TRANSPOSED


class _Plan(NamedTuple):
    rows: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def batch(self) -> int:
        return min(BATCH, self.tokens)

    @property
    def batches(self) -> int:
        return self.tokens // self.batch


def gated_delta_rule(q, k, v, log_decay, beta, state, *, interpret: Any = None):
    rows, tokens, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    _check(key_dim, value_dim)
    # A batch of copied tokens is whole: padded tokens neither decay nor write.
    spare = -tokens % BATCH if tokens > BATCH else 0
    q, k, v, log_decay, beta = (
        jnp.pad(x.astype(jnp.float32), [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))
        for x in (q, k, v, log_decay, beta)
    )
    plan = _Plan(rows, tokens + spare, heads, key_dim, value_dim)
    gates = (x.swapaxes(1, 2) for x in (jnp.exp(log_decay), beta))
    out, state, corrected = _launch(plan, q, k, v, *gates, state, interpret=interpret)
    return out[:, :tokens], state, corrected[:, :tokens]


def _check(key_dim, value_dim):
    if key_dim not in _KEY_DIMS:
        raise UnsupportedKernel(
            f"gated_delta_rule: mosaic_gpu takes dk of 64, 128 or 256 and got {key_dim}; take 'xla'"
        )
    if value_dim % COLUMNS:
        raise UnsupportedKernel(f"gated_delta_rule: mosaic_gpu takes dv of a multiple of {COLUMNS} and got {value_dim}")


def _launch(plan: _Plan, *inputs, interpret):
    def kernel(*refs):
        pl.run_scoped(
            partial(_block, plan, *refs),
            {"q": _tokens_of(plan, plan.key_dim), "k": _tokens_of(plan, plan.key_dim), "v": _tokens_of(plan, COLUMNS)},
            plgpu.Barrier(num_arrivals=3, num_barriers=2),
        )

    values = jax.ShapeDtypeStruct((plan.rows, plan.tokens, plan.heads, plan.value_dim), jnp.float32)
    state = jax.ShapeDtypeStruct((plan.rows, plan.heads, plan.key_dim, plan.value_dim), jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=(values, state, values),
        grid=(plan.value_dim // COLUMNS, plan.heads, plan.rows),
        grid_names=("slice", "head", "row"),
        compiler_params=COMPILER_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )(*inputs)


def _tokens_of(plan: _Plan, size: int):
    return plgpu.SMEM((2, plan.batch, size), jnp.float32)


def _block(plan: _Plan, q, k, v, decay, beta, state, out, final, corrected, smem, ready):
    """One row, head and slice of columns through all tokens."""
    piece, head, row = (lax.axis_index(name) for name in ("slice", "head", "row"))
    columns = pl.ds(piece * COLUMNS, COLUMNS)

    def fill(batch, slot):
        tokens = pl.ds(batch * plan.batch, plan.batch)
        plgpu.copy_gmem_to_smem(q.at[row, tokens, head], smem["q"].at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(k.at[row, tokens, head], smem["k"].at[slot], ready.at[slot])
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
            held, out_t, u_t = _token(held, q_t, k_t, v_t, decay[row, head, token], beta[row, head, token])
            out.at[row, token, head, columns][...] = out_t
            corrected.at[row, token, head, columns][...] = u_t
            return held

        held = lax.fori_loop(0, plan.batch, through_token, held)

        @pl.when(batch + 2 < plan.batches)
        def _():
            plgpu.commit_smem()  # All have read the slot before the copy, another kind of memory access, fills it.
            fill(batch + 2, slot)

        return held

    held = load(transpose(state.at[row, head, :, columns]), _LAYOUT, optimized=False)
    held = lax.fori_loop(0, plan.batches, through_batch, held)
    transpose(final.at[row, head, :, columns])[...] = held


def _token(state, q, k, v, decay, beta):
    """One step on the transposed state [dv dk]: the new state, the output and the corrected value.

    S^T q after the write is (S^T q before it) + (k . q) u, so both sums read the same state.
    """

    def along(vector, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, state.shape, (axis,)), _LAYOUT)

    state = state * decay
    keys, queries = along(k, 1), along(q, 1)
    u = beta * (v - (state * keys).sum(axis=1))
    state = state + keys * along(u, 0)
    return state, (state * queries).sum(axis=1), u
