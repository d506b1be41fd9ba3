"""Models and caches that never were trained or filled: random numbers made on the device, for measuring steps."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from wmtp_jax.config import ModelConfig
from wmtp_jax.decode.drafter import Drafter
from wmtp_jax.decode.prefill import start_state
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder, abstract, unroll
from wmtp_jax.models.parameters import named_parameters, with_parameters


def synthetic_model(config: ModelConfig, dtype: DTypeLike, unrolled: bool) -> Decoder:
    """A model with random weights of a trained model's sizes."""
    empty = abstract(config, dtype)
    names = named_parameters(empty)
    leaves = {name: _parameter(name, leaf, salt, config) for salt, (name, leaf) in enumerate(names.items())}
    model = with_parameters(empty, leaves)
    return unroll(model) if unrolled else model


def synthetic_state(
    model: Decoder, drafter: Drafter, lengths: Sequence[int], new_tokens: int, dtype: DTypeLike
) -> DecodeState:
    """Rows that have committed ``lengths`` tokens: caches full of random keys and values, and one to come."""
    rows = len(lengths)
    state = start_state(
        model,
        drafter,
        [range(length) for length in lengths],
        [new_tokens] * rows,
        page_size=None,
        dtype=dtype,
        penalized=False,
    )
    cache = replace(state.cache, keys=_fill(state.cache.keys, 1.0, 1), values=_fill(state.cache.values, 1.0, 2))
    recurrent = jax.tree.map(lambda x: _fill(x, 0.1, 3), state.recurrent)
    draft = jax.tree.map(lambda x: _fill(x, 1.0, 4), state.draft)
    run = state.committed
    return replace(
        state,
        cache=cache,
        recurrent=recurrent,
        draft=draft,
        length=jnp.asarray(lengths, jnp.int32),
        pending=jnp.arange(1, rows + 1, dtype=jnp.int32) % model.config.vocab_size,
        committed=replace(run, hidden=_fill(run.hidden, 1.0, 5), count=jnp.ones_like(run.count)),
    )


def _parameter(name: str, leaf: Any, salt: int, config: ModelConfig) -> Array:
    shape, dtype = leaf.shape, leaf.dtype
    if name.endswith("A_log"):
        return noise(shape, dtype, 0.5, salt, mean=1.5)
    if name.endswith("dt_bias"):
        return noise(shape, dtype, 0.5, salt, mean=-4.0)
    if name.endswith("norm.weight") or name.endswith(".weight"):
        centered = config.zero_centered_norm and not name.endswith("mixer.norm.weight")
        return noise(shape, dtype, 0.1, salt, mean=0.0 if centered else 1.0)
    if name.endswith("bias"):
        return noise(shape, dtype, 0.02, salt)
    size_in = config.hidden_size if name.startswith("embedding") else shape[-2]
    return noise(shape, dtype, 1 / math.sqrt(size_in), salt)


@partial(jax.jit, static_argnames=("shape", "dtype", "scale", "salt", "mean"))
def noise(shape: tuple[int, ...], dtype: DTypeLike, scale: float, salt: int, mean: float = 0.0) -> Array:
    """Uniform numbers of this mean and standard deviation, hashed from their indices (the finalizer of MurmurHash3).

    One fused pass that writes the result and nothing else: a generator's random bits would need several times the
    memory of the largest weight.
    """
    index = jnp.full(shape, salt * 0x9E3779B9 % 2**32, jnp.uint32)
    for axis in range(len(shape)):
        index = index * jnp.uint32(0x01000193) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    index = (index ^ (index >> 16)) * jnp.uint32(0x85EBCA6B)
    index = (index ^ (index >> 13)) * jnp.uint32(0xC2B2AE35)
    uniform = (index ^ (index >> 16)).astype(jnp.float32) * 2.0**-31 - 1.0
    return (mean + scale * math.sqrt(3.0) * uniform).astype(dtype)


def _fill(array: Array, scale: float, salt: int) -> Array:
    """Random numbers in the array's own memory."""
    shape, dtype = array.shape, array.dtype
    array.delete()
    return noise(shape, dtype, scale, salt)
