"""The target: embedding, scans over periods of residual blocks, final norm, output head; and its draft head."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.bit_patterns import take_rows
from wmtp_jax.config import RECURRENT_KINDS, BlockKind, ModelConfig, Segment
from wmtp_jax.models.attention import Attention
from wmtp_jax.models.block import Block
from wmtp_jax.models.delta_net import DeltaNet
from wmtp_jax.models.draft_vocabulary import DraftVocabulary
from wmtp_jax.models.layers import Linear, RMSNorm, float32_product
from wmtp_jax.models.mamba import Mamba2
from wmtp_jax.models.mtp import MTP
from wmtp_jax.models.recurrent import RecurrentState

Cache = TypeVar("Cache")
# Stores one attention layer's new keys and values, then attends: (cache, layer, q, k, v) -> (attended, cache).
Attend = Callable[[Cache, Int[Array, ""], Array, Array, Array], tuple[Float[Array, "B T H D"], Cache]]

_UNROLLED_BLOCKS = 128


class Decoder(nnx.Module):
    """A hybrid language model.

    ``blocks`` are the blocks of one period of every segment, with parameters stacked over the segment's periods.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        self.unrolled = False
        # Which implementation of the operations in pallas_kernels runs; None lets each choose.
        self.kernels: str | None = None
        embedding = 0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size))
        self.embedding = nnx.Param(embedding.astype(dtype))

        def period(key: Array, pattern: tuple[BlockKind, ...]) -> nnx.List[Block]:
            own = nnx.Rngs(key)
            return nnx.List([Block(kind, config, rngs=own, dtype=dtype) for kind in pattern])

        blocks = []
        for segment in config.segments:
            keys = jax.random.split(rngs.params(), segment.num_periods)
            blocks += jax.vmap(partial(period, pattern=segment.pattern))(keys)
        self.blocks: Any = nnx.List(blocks)
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centered_norm, dtype)
        head = (config.hidden_size, config.vocab_size)
        self.lm_head = None if config.tie_embeddings else Linear(*head, rngs=rngs, dtype=dtype)
        self.mtp = MTP(config, rngs=rngs, dtype=dtype) if config.has_mtp else None
        # Heads that were trained beside the model, and the fewer tokens that they draft; see wmtp_jax.clp.
        self.heads: Any = None
        self.draft_vocabulary: DraftVocabulary | None = None

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """Token embeddings, shared by the target and the draft head."""
        return take_rows(self.embedding[...], tokens)

    def logits(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Float32 logits of normed hidden states, from the target or from the draft head."""
        if self.lm_head is not None:
            return float32_product(hidden, self.lm_head.kernel[...])
        return float32_product(hidden, self.embedding[...], axis=1)

    def draft_logits(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """The same for drafts, which may be chosen from fewer tokens."""
        if self.draft_vocabulary is None:
            return self.logits(hidden)
        return self.draft_vocabulary.spread(self.draft_vocabulary.logits(hidden))

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Int[Array, " B"] | None,
        states: tuple[RecurrentState, ...],
        cache: Cache,
        attend: Attend[Cache],
    ) -> tuple[Float[Array, "B T M"], tuple[Any, ...], Cache]:
        """Runs T tokens a row after what the caches hold.

        ``states`` has one entry a recurrent block of every segment's period, with a leading axis over the periods. The
        attention cache goes through the scans as their carry, so that it is updated in place and never restacked.
        Returns the hidden states after the final norm; a new ``RecurrentState`` (``valid`` tokens a row committed) or,
        with ``valid=None``, a ``RecurrentRun`` for each entry of ``states``; and the cache.
        """

        def period(carry, xs):
            x, cache, layer = carry
            blocks, states = xs
            states, updates = iter(states), []
            for block in blocks:
                normed = block.norm(x)
                if isinstance(block.mixer, Attention):
                    q, gate = block.mixer.queries(normed, positions)
                    attended, cache = attend(cache, layer, q, *block.mixer.keys_values(normed, positions))
                    y, layer = block.mixer.output(attended, gate), layer + 1
                elif isinstance(block.mixer, DeltaNet | Mamba2):
                    y, update = block.mixer(normed, next(states), valid, self.kernels)
                    updates.append(update)
                else:
                    y = block.mixer(normed)
                x = x + y
            return (x, cache, layer), tuple(updates)

        carry, updates, blocks = (self.embed(tokens), cache, jnp.int32(0)), (), iter(self.blocks)
        for segment in self.config.segments:
            recurrent = sum(kind in RECURRENT_KINDS for kind in segment.pattern)
            own, states = states[:recurrent], states[recurrent:]
            carry, new = self._over_periods(period, carry, segment, blocks, own)
            updates += new
        x, cache, _ = carry
        return self.final_norm(x), updates, cache

    def _over_periods(
        self, body: Callable, carry: Any, segment: Segment, blocks: Iterator[Any], states: tuple[RecurrentState, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        """``lax.scan`` over a segment's periods, or a plain loop where each has its own arrays (``unroll``).

        Takes the segment's part of ``blocks``, the rest of ``self.blocks``.
        """
        if not self.unrolled:
            period = nnx.List(islice(blocks, len(segment.pattern)))
            return jax.lax.scan(body, carry, (period, states))
        updates = []
        for index, period in enumerate(islice(blocks, segment.num_periods)):
            carry, update = body(carry, (period, jax.tree.map(lambda x, i=index: x[i], states)))
            updates.append(update)
        return carry, jax.tree.map(lambda *x: jnp.stack(x), *updates)

    def initial_states(self, rows: int) -> tuple[RecurrentState, ...]:
        """Zero recurrent states for ``rows`` rows, an entry a recurrent block of a period, stacked over the periods."""
        states, blocks = [], iter(self.blocks)
        for segment in self.config.segments:
            taken = list(islice(blocks, segment.num_periods if self.unrolled else len(segment.pattern)))
            for block in taken[0] if self.unrolled else taken:
                if isinstance(block.mixer, DeltaNet | Mamba2):
                    states.append(_stacked_zeros(block.mixer.initial_state(rows), segment.num_periods))
        return tuple(states)

    def sequence(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """Normed hidden states of whole sequences without any cache: for training and parity checks."""
        rows, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)

        def attend(cache, layer, q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache

        valid = jnp.full(rows, length)
        return self.hidden_states(tokens, positions, valid, self.initial_states(rows), None, attend)[0]


def _stacked_zeros(state: RecurrentState, periods: int) -> RecurrentState:
    return jax.tree.map(lambda x: jnp.zeros((periods, *x.shape), x.dtype), state)


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
    return jax.default_backend() == "cpu" and len(config.blocks) <= _UNROLLED_BLOCKS


def unroll(model: Decoder) -> Decoder:
    """The same model with a list of periods in place of stacked parameters, which it consumes one by one.

    A scan copies each period's parameters out of the stack before it uses them. Where reading parameters is the whole
    cost (few tokens, a CPU), that triples it; the price of the list is a compile time that grows with depth.
    """
    flat, periods, blocks = jax.tree.map(lambda x: x, model), [], iter(model.blocks)
    for segment in model.config.segments:
        leaves, tree = jax.tree.flatten(nnx.List(islice(blocks, len(segment.pattern))))
        slices = []
        for leaf in leaves:
            slices.append(list(leaf))
            leaf.delete()
        periods += [jax.tree.unflatten(tree, period) for period in zip(*slices, strict=True)]
    flat.blocks = nnx.List(periods)
    flat.unrolled = True
    return flat
