"""A verified run of a recurrent layer, and how any accepted prefix of it is folded into the state.

Every such layer adds key^T value to a decaying state, token by token, and no token's key or value depends on later
ones. So the state after a prefix is a weighted sum over its tokens, and rejected ones are simply left out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SHORT = 9
"""Tokens up to which the sum is one pass over the state; XLA's batched products take twice as long on a CPU."""


class Replay(NamedTuple):
    """What a verified run leaves behind. H heads may share G keys: head h reads key h // (H // G)."""

    keys: Float[Array, "*B T G dk"]
    values: Float[Array, "*B T H dv"]
    log_decay: Float[Array, "*B T H"]


def commit(
    state: Float[Array, "*B H dk dv"], replay: Replay, accepted: Int[Array, " *B"]
) -> Float[Array, "*B H dk dv"]:
    """The state after the first ``accepted`` tokens of a replayed run; leading axes are free (layers, rows)."""
    kept = jnp.arange(replay.keys.shape[-3]) < accepted[..., None]
    log_decay = jnp.where(kept[..., None], replay.log_decay, 0.0)
    values = jnp.where(kept[..., None, None], replay.values, 0.0)
    # Accelerators round float32 products to fewer bits unless told otherwise, and the state would carry that on.
    with jax.default_matmul_precision("highest"):
        return fold(state, replay.keys, values, log_decay)


def fold(
    state: Float[Array, "*B H dk dv"],
    keys: Float[Array, "*B T G dk"],
    values: Float[Array, "*B T H dv"],
    log_decay: Float[Array, "*B T H"],
) -> Float[Array, "*B H dk dv"]:
    """The state after all tokens."""
    *_, tokens, groups, _ = keys.shape
    # Summed by products with ones: a single operation where XLA spells a cumulative sum out in many.
    later = jnp.triu(jnp.ones((tokens, tokens)), 1)
    values = values * jnp.exp(jnp.einsum("tk,...kh->...th", later, log_decay))[..., None]
    decay = jnp.exp(log_decay.sum(axis=-2))[..., None, None]
    grouped = (*values.shape[:-2], groups, values.shape[-2] // groups, values.shape[-1])
    values = values.reshape(grouped)
    if tokens <= SHORT:
        added = sum(keys[..., t, :, None, :, None] * values[..., t, :, :, None, :] for t in range(tokens))
    else:
        added = jnp.einsum("...tgk,...tghv->...ghkv", keys, values)
    return decay * state + jnp.reshape(added, state.shape)
