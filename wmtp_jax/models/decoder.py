"""The target: embedding, a scan over periods of residual blocks, final norm, output head; and its draft head."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.config import ModelConfig
from wmtp_jax.models.attention import Attention
from wmtp_jax.models.block import Block
from wmtp_jax.models.delta_net import DeltaNet, DeltaState
from wmtp_jax.models.layers import Linear, RMSNorm
from wmtp_jax.models.mtp import MTP

Cache = TypeVar("Cache")
# Stores one attention layer's new keys and values, then attends: (cache, layer, q, k, v) -> (attended, cache).
Attend = Callable[[Cache, Int[Array, ""], Array, Array, Array], tuple[Float[Array, "B T H D"], Cache]]

_UNROLLED_PERIODS = 16


class Decoder(nnx.Module):
    """A hybrid language model. ``blocks`` are the blocks of one period with parameters stacked over the periods."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        self.unrolled = False
        # Which implementation of the operations in pallas_kernels runs; None lets each choose.
        self.kernels: str | None = None
        embedding = 0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size))
        self.embedding = nnx.Param(embedding.astype(dtype))

        def period(key: Array) -> nnx.List[Block]:
            own = nnx.Rngs(key)
            return nnx.List([Block(kind, config, rngs=own, dtype=dtype) for kind in config.pattern])

        self.blocks: Any = jax.vmap(period)(jax.random.split(rngs.params(), config.num_periods))
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centered_norm, dtype)
        head = (config.hidden_size, config.vocab_size)
        self.lm_head = None if config.tie_embeddings else Linear(*head, rngs=rngs, dtype=dtype)
        self.mtp = MTP(config, rngs=rngs, dtype=dtype) if config.has_mtp else None

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """Token embeddings, shared by the target and the draft head."""
        return self.embedding[...][tokens]

    def logits(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Float32 logits of normed hidden states, from the target or from the draft head."""
        if self.lm_head is not None:
            kernel = self.lm_head.kernel[...]
            return jnp.einsum("btm,mv->btv", hidden, kernel, preferred_element_type=jnp.float32)
        return jnp.einsum("btm,vm->btv", hidden, self.embedding[...], preferred_element_type=jnp.float32)

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Int[Array, " B"] | None,
        states: tuple[DeltaState, ...],
        cache: Cache,
        attend: Attend[Cache],
    ) -> tuple[Float[Array, "B T M"], tuple[Any, ...], Cache]:
        """Runs T tokens a row after what the caches hold.

        ``states`` has one entry a delta block of the period, with a leading axis over the periods. The attention
        cache goes through the scan as its carry, so that it is updated in place and never restacked. Returns the
        hidden states after the final norm; a new ``DeltaState`` (``valid`` tokens a row committed) or, with
        ``valid=None``, a ``DeltaReplay`` for each delta block; and the cache.
        """
        per_period = self.config.pattern.count("attention")

        def period(carry, xs):
            x, cache = carry
            blocks, index, states = xs
            layer, states, updates = index * per_period, iter(states), []
            for block in blocks:
                normed = block.norm(x)
                if isinstance(block.mixer, Attention):
                    q, gate = block.mixer.queries(normed, positions)
                    attended, cache = attend(cache, layer, q, *block.mixer.keys_values(normed, positions))
                    y, layer = block.mixer.output(attended, gate), layer + 1
                elif isinstance(block.mixer, DeltaNet):
                    y, update = block.mixer(normed, next(states), valid, self.kernels)
                    updates.append(update)
                else:
                    y = block.mixer(normed)
                x = x + y
            return (x, cache), tuple(updates)

        (x, cache), updates = self._over_periods(period, (self.embed(tokens), cache), states)
        return self.final_norm(x), updates, cache

    def _over_periods(self, body: Callable, carry: Any, states: Any) -> tuple[Any, Any]:
        """``lax.scan`` over the periods, or a plain loop where each period has its own arrays (``unroll``)."""
        if not self.unrolled:
            return jax.lax.scan(body, carry, (self.blocks, jnp.arange(self.config.num_periods), states))
        updates = []
        for index, blocks in enumerate(self.blocks):
            carry, update = body(carry, (blocks, jnp.int32(index), jax.tree.map(lambda x, i=index: x[i], states)))
            updates.append(update)
        return carry, jax.tree.map(lambda *x: jnp.stack(x), *updates)

    def initial_states(self, rows: int) -> tuple[DeltaState, ...]:
        """Zero recurrent states for ``rows`` rows, stacked over the periods."""
        count = self.config.num_periods
        return tuple(
            jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), block.mixer.initial_state(rows))
            for block in (self.blocks[0] if self.unrolled else self.blocks)
            if isinstance(block.mixer, DeltaNet)
        )

    def sequence(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """Normed hidden states of whole sequences without any cache: for training and parity checks."""
        rows, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)

        def attend(cache, layer, q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache

        valid = jnp.full(rows, length)
        return self.hidden_states(tokens, positions, valid, self.initial_states(rows), None, attend)[0]


def build(config: ModelConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Decoder:
    """A randomly initialised model."""
    return Decoder(config, rngs=nnx.Rngs(seed), dtype=dtype)


def abstract(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> Decoder:
    """The same tree with shapes instead of arrays; allocates nothing."""
    return nnx.eval_shape(lambda: build(config, 0, dtype))


def with_kernels(model: Decoder, kernels: str | None) -> Decoder:
    """The same model and arrays, run by another implementation of the operations in ``pallas_kernels``."""
    other = jax.tree.map(lambda x: x, model)
    other.kernels = kernels
    return other


def prefers_unrolled(config: ModelConfig) -> bool:
    """Whether ``unroll`` pays here: on a CPU, up to a depth beyond which compiling every period costs too much."""
    return jax.default_backend() == "cpu" and config.num_periods <= _UNROLLED_PERIODS


def unroll(model: Decoder) -> Decoder:
    """The same model with a list of periods in place of stacked parameters, which it consumes one by one.

    A scan copies each period's parameters out of the stack before it uses them. Where reading parameters is the whole
    cost (few tokens, a CPU), that triples it; the price of the list is a compile time that grows with depth.
    """
    leaves, tree = jax.tree.flatten(model.blocks)
    slices = []
    for leaf in leaves:
        slices.append(list(leaf))
        leaf.delete()
    flat = jax.tree.map(lambda x: x, model)
    flat.blocks = nnx.List([jax.tree.unflatten(tree, period) for period in zip(*slices, strict=True)])
    flat.unrolled = True
    return flat
