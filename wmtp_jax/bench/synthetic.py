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

from wmtp_jax.bench.machine import require_free
from wmtp_jax.cache.paged import PagedCache
from wmtp_jax.config import ModelConfig
from wmtp_jax.decode.drafter import Drafter, Plain
from wmtp_jax.decode.prefill import draft_dtype, start_state
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.models.decoder import Decoder, abstract, prefers_unrolled, unroll
from wmtp_jax.models.parameters import named_parameters, with_parameters


def synthetic_model(config: ModelConfig, dtype: DTypeLike) -> Decoder:
    """A model with random weights of a trained model's sizes, laid out as ``load`` would.

    Raises UserError where the free memory cannot hold them.
    """
    empty = abstract(config, dtype)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(empty))
    require_free(weights, "the weights alone do not fit")
    named = enumerate(named_parameters(empty).items())
    model = with_parameters(empty, {name: _parameter(name, leaf, salt, config) for salt, (name, leaf) in named})
    return unroll(model) if prefers_unrolled(config) else model


def cache_bytes(model: Decoder, drafters: Mapping[str, Drafter], capacity: int, rows: int, dtype: DTypeLike) -> int:
    """Bytes that ``SyntheticRows`` of this size hold, from shapes alone."""
    shapes = jax.eval_shape(lambda: _allocate(model, drafters, capacity, rows, dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _allocate(
    model: Decoder, drafters: Mapping[str, Drafter], capacity: int, rows: int, dtype: DTypeLike
) -> tuple[PagedCache, Any, dict[str, Any]]:
    prompts = [range(capacity)] * rows
    state = start_state(model, Plain(), prompts, [0] * rows, page_size=None, dtype=dtype, penalized=False)
    capacity, dtype = state.cache.table.shape[1] * state.cache.page_size, draft_dtype(model, dtype)
    drafts = {name: drafter.start(model, rows, capacity, dtype) for name, drafter in drafters.items()}
    return state.cache, state.recurrent, drafts


class SyntheticRows:
    """Rows whose caches hold random keys and values at up to ``capacity`` positions.

    One target cache serves every drafter and every shorter context; each drafter has its own draft cache. Calls take
    their state donated, and the buffers that come back serve the next one.
    """

    def __init__(self, model: Decoder, drafters: Mapping[str, Drafter], capacity: int, rows: int, dtype: DTypeLike):
        self._model, self._drafters, self._rows = model, drafters, rows
        cache, recurrent, drafts = _allocate(model, drafters, capacity, rows, dtype)
        self._cache, self._recurrent = fill(cache), fill(recurrent, scale=0.1)
        self._drafts = {name: fill(draft) for name, draft in drafts.items()}

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


@partial(jax.jit, static_argnames=("shape", "dtype"))
def noise(
    shape: tuple[int, ...], dtype: DTypeLike, scale: float | Array, salt: int | Array, mean: float | Array = 0.0
) -> Array:
    """Uniform numbers of this mean and standard deviation, hashed from their indices (the finalizer of MurmurHash3).

    One fused pass that writes the result and nothing else: a generator's random bits would need several times the
    memory of the largest weight.
    """
    index = jnp.full(shape, jnp.asarray(salt, jnp.uint32) * jnp.uint32(0x9E3779B9))
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
    if name.endswith(".D"):
        return noise(shape, dtype, 0.1, salt, mean=1.0)
    if name.endswith("weight"):
        # The norm inside a recurrent block is never zero-centered.
        zero_centered = config.zero_centered_norm and not name.endswith(("mixer.norm.weight", "mixer.norm_weight"))
        return noise(shape, dtype, 0.1, salt, mean=0.0 if zero_centered else 1.0)
    if name.endswith("bias"):
        return noise(shape, dtype, 0.02, salt)
    size_in = shape[-1] if name.startswith("embedding") else shape[-2]
    return noise(shape, dtype, 1 / math.sqrt(size_in), salt)


def fill(cache: Any, scale: float = 1.0) -> Any:
    """A cache with random numbers in every array but those of int32, which say where things are."""
    arrays, tree = jax.tree.flatten(cache)
    return tree.unflatten([x if x.dtype == jnp.int32 else _refill(x, scale, salt) for salt, x in enumerate(arrays)])


def _refill(array: Array, scale: float, salt: int) -> Array:
    shape, dtype = array.shape, array.dtype
    array.delete()
    return noise(shape, dtype, scale, salt)
