"""Models and caches that never were trained or filled: random numbers made on the device, for measuring steps."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from wmtp_jax.config import ModelConfig
from wmtp_jax.decode.drafter import Drafter, Plain
from wmtp_jax.decode.prefill import start_state
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.models.decoder import Decoder, abstract, prefers_unrolled, unroll
from wmtp_jax.models.parameters import named_parameters, with_parameters


def synthetic_model(config: ModelConfig, dtype: DTypeLike) -> Decoder:
    """A model with random weights of a trained model's sizes, laid out as ``load`` would."""
    empty = abstract(config, dtype)
    named = enumerate(named_parameters(empty).items())
    model = with_parameters(empty, {name: _parameter(name, leaf, salt, config) for salt, (name, leaf) in named})
    return unroll(model) if prefers_unrolled(config) else model


class SyntheticRows:
    """Rows whose caches hold random keys and values at up to ``capacity`` positions.

    One target cache serves every drafter and every shorter context; each drafter has its own draft cache. Calls take
    their state donated, and the buffers that come back serve the next one.
    """

    def __init__(self, model: Decoder, drafters: Mapping[str, Drafter], capacity: int, rows: int, dtype: DTypeLike):
        prompts = [range(capacity)] * rows
        state = start_state(model, Plain(), prompts, [0] * rows, page_size=None, dtype=dtype, penalized=False)
        capacity = state.cache.table.shape[1] * state.cache.page_size
        self._model, self._drafters, self._rows = model, drafters, rows
        self._cache = fill(state.cache)
        self._recurrent = jax.tree.map(partial(_refill, scale=0.1), state.recurrent)
        draft_dtype = dtype if jnp.dtype(dtype).itemsize > 1 else model.embedding.dtype
        self._drafts = {name: fill(d.start(model, rows, capacity, draft_dtype)) for name, d in drafters.items()}

    def seconds(self, name: str, context: int, call: Callable[[Drafter, DecodeState], DecodeState]) -> float:
        """Seconds that ``call`` takes with this drafter's caches and ``context`` committed tokens a row."""
        given = self._state(name, context)
        jax.block_until_ready(given)
        begin = time.perf_counter()
        after = call(self._drafters[name], given)
        jax.block_until_ready(after)
        seconds = time.perf_counter() - begin
        self._cache, self._recurrent, self._drafts[name] = after.cache, after.recurrent, after.draft
        return seconds

    def _state(self, name: str, context: int) -> DecodeState:
        rows, run = self._rows, self._drafters[name].gamma + 1
        vocab, width = self._model.config.vocab_size, self._model.config.hidden_size
        hidden = noise((rows, run, width), self._model.embedding.dtype, 1.0, 5)
        tokens = jnp.arange(rows * run, dtype=jnp.int32).reshape(rows, run) % vocab
        return DecodeState(
            cache=self._cache,
            recurrent=self._recurrent,
            draft=self._drafts[name],
            length=jnp.full(rows, context, jnp.int32),
            # A copy: two donated arguments must not be one buffer.
            pending=tokens[:, -1] + 0,
            committed=Committed(hidden, tokens, jnp.ones(rows, jnp.int32)),
            remaining=jnp.full(rows, 2**30, jnp.int32),
            done=jnp.zeros(rows, bool),
            history=None,
        )


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
    # Whole numbers would round to nearly nothing: they get all of their range.
    scale = 64.0 if jnp.issubdtype(dtype, jnp.integer) else scale
    return (mean + scale * math.sqrt(3.0) * uniform).astype(dtype)


def _parameter(name: str, leaf: Any, salt: int, config: ModelConfig) -> Array:
    shape, dtype = leaf.shape, leaf.dtype
    if name.endswith("A_log"):
        return noise(shape, dtype, 0.5, salt, mean=1.5)
    if name.endswith("dt_bias"):
        return noise(shape, dtype, 0.5, salt, mean=-4.0)
    if name.endswith("weight"):
        # The norm inside a recurrent block is never zero-centered.
        zero_centered = config.zero_centered_norm and not name.endswith("mixer.norm.weight")
        return noise(shape, dtype, 0.1, salt, mean=0.0 if zero_centered else 1.0)
    if name.endswith("bias"):
        return noise(shape, dtype, 0.02, salt)
    size_in = shape[-1] if name.startswith("embedding") else shape[-2]
    return noise(shape, dtype, 1 / math.sqrt(size_in), salt)


def fill(cache: Any) -> Any:
    """A cache with random numbers in every array but whole ones, which say where things are."""
    return jax.tree.map(lambda x: x if x.dtype == jnp.int32 else _refill(x, scale=1.0), cache)


def _refill(array: Array, scale: float) -> Array:
    shape, dtype = array.shape, array.dtype
    array.delete()
    return noise(shape, dtype, scale, len(shape))
