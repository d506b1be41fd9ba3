"""Pallas kernel for TPUs: the chunked form of ``xla.py``, with the state kept in VMEM from chunk to chunk.

An instance takes several heads side by side, so that the chain of small products that inverts one head's system hides
behind the others'.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

CHUNK = 64
_HEADS = 8
# Of VMEM, for the states of an instance's heads; they are there four times, in and out and double-buffered.
_STATE_BYTES = 1024 * 1024


def gated_delta_rule(q, k, v, log_decay, beta, state, *, interpret: bool = False):
    """See the front door; returns the outputs, the state after all tokens and the corrected values."""
    batch, tokens, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    chunk = min(CHUNK, max(8, 1 << (tokens - 1).bit_length()))
    chunks = -(-tokens // chunk)
    together = _heads_together(heads, key_dim * value_dim)
    q, k, v, log_decay, beta = (_head_major(x, chunk * chunks) for x in (q, k, v, log_decay, beta))
    log_decay, beta = (x.reshape(batch, heads, chunks, chunk) for x in (log_decay, beta))
    gates = jnp.stack([jnp.cumsum(log_decay, axis=-1), beta], axis=3)

    def tokens_of(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, together, chunk, width), lambda row, head, at: (row, head, at, 0))

    gates_spec = pl.BlockSpec((None, together, None, 2, chunk), lambda row, head, at: (row, head, at, 0, 0))
    state_spec = pl.BlockSpec((None, together, key_dim, value_dim), lambda row, head, at: (row, head, 0, 0))
    out, final, corrected = pl.pallas_call(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (v, state, v)],
        grid=(batch, heads // together, chunks),
        in_specs=[tokens_of(key_dim), tokens_of(key_dim), tokens_of(value_dim), gates_spec, state_spec],
        out_specs=[tokens_of(value_dim), state_spec, tokens_of(value_dim)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="gated_delta_rule",
    )(q, k, v, gates, state)
    return out[:, :, :tokens].swapaxes(1, 2), final, corrected[:, :, :tokens].swapaxes(1, 2)


def _heads_together(heads: int, state_size: int) -> int:
    most = max(1, min(_HEADS, _STATE_BYTES // (4 * state_size)))
    return max(count for count in range(1, most + 1) if heads % count == 0)


def _head_major(x, padded: int):
    """[B T H ...] to [B H T ...], zero-padded: a zero token leaves the state as it is."""
    x = x.swapaxes(1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, padded - x.shape[2])] + [(0, 0)] * (x.ndim - 3))


def _kernel(q_ref, k_ref, v_ref, gates_ref, begin_ref, out_ref, state_ref, corrected_ref):
    """q, k [h C dk], v [h C dv], gates [h 2 C] (decay summed up in the chunk, beta), states [h dk dv]."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_ref[...] = begin_ref[...]

    q, k, v, state = q_ref[...], k_ref[...], v_ref[...], state_ref[...]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (1, k.shape[1], k.shape[1]), axis) for axis in (1, 2))
    total_row, beta_row = gates_ref[:, 0:1], gates_ref[:, 1:2]
    # A row [h 1 C] turned to a column [h C 1].
    total, beta = (jnp.where(row == column, x, 0.0).sum(axis=2, keepdims=True) for x in (total_row, beta_row))
    relative = jnp.exp(jnp.minimum(total - total_row, 0.0))
    system = jnp.where(row > column, beta * relative * _dot("hik,hjk->hij", k, k), 0.0)
    faded = jnp.exp(total)
    right = beta * (v - faded * _dot("hik,hkv->hiv", k, state))
    u = _dot("hij,hjv->hiv", _inverse(system, row, column), right)
    scores = jnp.where(row >= column, relative * _dot("hik,hjk->hij", q, k), 0.0)
    out_ref[...] = faded * _dot("hik,hkv->hiv", q, state) + _dot("hij,hjv->hiv", scores, u)
    corrected_ref[...] = u
    end = total_row[:, :, -1:]
    state_ref[...] = jnp.exp(end) * state + _dot("hik,hiv->hkv", k * jnp.exp(end - total), u)


def _inverse(system, row, column):
    """(I + system)^-1 [h C C] by block inversion: blocks on the diagonal double by the corner below them.

    The blocks are cut out by masks rather than slices, which would be smaller than a register.
    """
    inverse = jnp.where(row == column, 1.0, 0.0) + jnp.zeros_like(system)
    for level in range((system.shape[-1] - 1).bit_length()):
        pair = (row >> level + 1 == column >> level + 1) & (row >> level > column >> level)
        corner = jnp.where(pair, system, 0.0)
        if level:
            corner = _dot("hij,hjk->hik", inverse, _dot("hij,hjk->hik", corner, inverse))
        inverse = inverse - corner
    return inverse


def _dot(dims: str, x, y):
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
