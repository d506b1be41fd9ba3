"""A chunked recurrence on TPUs, with the state kept in VMEM from chunk to chunk.

An instance takes several heads side by side, so that one head's chain of small products hides behind the others'.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import decay

CHUNK = 64
_HEADS = 8
# Of VMEM, for the states of an instance's heads; they are there four times, in and out and double-buffered.
_STATE_BYTES = 1024 * 1024


def recur(
    kernel: Callable,
    name: str,
    q: Float[Array, "B T G dk"],
    k: Float[Array, "B T G dk"],
    v: Float[Array, "B T H dv"],
    log_decay: Float[Array, "B T H"],
    *writes: Float[Array, "B T H"],
    state: Float[Array, "B H dk dv"],
    results: int,
    interpret: bool,
) -> tuple[list[Float[Array, "B T H dv"]], Float[Array, "B H dk dv"]]:
    """Runs ``kernel`` over the chunks; returns its ``results`` and the state after all.

    ``kernel(q, k, v, gates, state, *outs)`` gets references for ``h`` heads: q, k [h C dk], or [1 C dk] where heads
    share them; v and outs [h C dv]; gates [h 2+ C], the coarse and the fine sums of ``decay.running`` and what else is
    given a token; and the state [h dk dv], which it moves on. A padded token has zeros everywhere and must leave it as
    it is.
    """
    batch, tokens, groups, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    chunk = min(CHUNK, max(8, 1 << (tokens - 1).bit_length()))
    chunks = -(-tokens // chunk)
    shared = heads // groups
    together = _heads_together(heads if shared == 1 else shared, key_dim * value_dim)
    q, k, v, *singles = (_head_major(x, chunk * chunks) for x in (q, k, v, log_decay, *writes))
    decays, *others = (x.reshape(batch, heads, chunks, chunk) for x in singles)
    gates = jnp.stack([*decay.running(decays), *others], axis=3)

    keys_spec = pl.BlockSpec(
        (None, together if shared == 1 else 1, chunk, key_dim),
        lambda row, head, at: (row, head if shared == 1 else jax.lax.div(head * together, shared), at, 0),
    )
    values_spec = pl.BlockSpec((None, together, chunk, value_dim), lambda row, head, at: (row, head, at, 0))
    gates_spec = pl.BlockSpec(
        (None, together, None, gates.shape[3], chunk), lambda row, head, at: (row, head, at, 0, 0)
    )
    state_spec = pl.BlockSpec((None, together, key_dim, value_dim), lambda row, head, at: (row, head, 0, 0))

    def body(q_ref, k_ref, v_ref, gates_ref, begin_ref, state_ref, *out_refs):
        @pl.when(pl.program_id(2) == 0)
        def _():
            state_ref[...] = begin_ref[...]

        kernel(q_ref, k_ref, v_ref, gates_ref, state_ref, *out_refs)

    final, *outs = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (state, *[v] * results)],
        grid=(batch, heads // together, chunks),
        in_specs=[keys_spec, keys_spec, values_spec, gates_spec, state_spec],
        out_specs=[state_spec, *[values_spec] * results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=pltpu.InterpretParams() if interpret else False,
        name=name,
    )(q, k, v, gates, state)
    return [out[:, :, :tokens].swapaxes(1, 2) for out in outs], final


def _heads_together(heads: int, state_size: int) -> int:
    most = max(1, min(_HEADS, _STATE_BYTES // (4 * state_size)))
    return max(count for count in range(1, most + 1) if heads % count == 0)


def _head_major(x, padded: int):
    """[B T H ...] to [B H T ...], zero-padded: a zero token leaves the state as it is."""
    x = x.swapaxes(1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, padded - x.shape[2])] + [(0, 0)] * (x.ndim - 3))


def places(size: int):
    """Row and column of every element of a square [1 C C]."""
    return (jax.lax.broadcasted_iota(jnp.int32, (1, size, size), axis) for axis in (1, 2))


def column(x):
    """A row [h 1 C] turned to a column [h C 1]."""
    at_row, at_column = places(x.shape[-1])
    return jnp.where(at_row == at_column, x, 0.0).sum(axis=2, keepdims=True)


def weights(gates_ref):
    """exp(G_i - G_j) where j <= i and else 0 [h C C]; exp(G_i) and exp(G_C - G_i) [h C 1]; exp(G_C) [h 1 1]."""
    coarse, fine = gates_ref[:, 0:1], gates_ref[:, 1:2]
    coarse_column, fine_column = column(coarse), column(fine)
    at_row, at_column = places(coarse.shape[-1])
    exponent = (coarse_column - coarse) + (fine_column - fine)
    inside = jnp.where(at_row >= at_column, jnp.exp(jnp.minimum(exponent, 0.0)), 0.0)
    end_coarse, end_fine = coarse[:, :, -1:], fine[:, :, -1:]
    to_end = jnp.exp((end_coarse - coarse_column) + (end_fine - fine_column))
    return inside, jnp.exp(coarse_column + fine_column), to_end, jnp.exp(end_coarse + end_fine)


def dot(dims: str, x, y):
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
