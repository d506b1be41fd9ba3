"""The heads, the layer that predicts how many of them to trust, and the larger gate that it is compared with."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wmtp_jax.clp.config import HeadsConfig
from wmtp_jax.config import ModelConfig
from wmtp_jax.models.draft_vocabulary import DraftVocabulary
from wmtp_jax.models.layers import Linear, float32_product
from wmtp_jax.models.mtp import MTP

GATE_SIZE = 1024


class ParallelHead(nnx.Module):
    """Linear(M, M/2) - GELU - Linear(M/2, U), with a vocabulary projection of its own (CLP, section 3)."""

    def __init__(self, size: int, vocab: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.inner = Linear(size, size // 2, bias=True, rngs=rngs, dtype=dtype)
        self.outer = Linear(size // 2, vocab, bias=True, rngs=rngs, dtype=dtype)

    def __call__(self, hidden: Float[Array, "*S M"]) -> Float[Array, "*S U"]:
        inner = jax.nn.gelu(self.inner(hidden))
        assert self.outer.bias is not None
        return float32_product(inner, self.outer.kernel[...]) + self.outer.bias[...].astype(jnp.float32)


class ResidualHead(nnx.Module):
    """``h + silu(Linear(h))``, zero at the start, so that training begins with the backbone's own next token."""

    def __init__(self, size: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.inner = Linear(size, size, bias=True, rngs=rngs, dtype=dtype)
        self.inner.kernel[...] = jnp.zeros_like(self.inner.kernel[...])

    def __call__(self, hidden: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        return hidden + jax.nn.silu(self.inner(hidden))


class Gate(nnx.Module):
    """Two hidden layers over what a head's distribution looks like; about a million parameters, as the paper's."""

    def __init__(self, *, rngs: nnx.Rngs, dtype: DTypeLike):
        sizes = (3, GATE_SIZE, GATE_SIZE, 1)
        self.layers = nnx.List([Linear(a, b, bias=True, rngs=rngs, dtype=dtype) for a, b in itertools.pairwise(sizes)])

    def __call__(self, features: Float[Array, "*S 3"]) -> Float[Array, "*S"]:
        """The logit of the head being right."""
        x = features
        for layer in list(self.layers)[:-1]:
            x = jax.nn.relu(layer(x))
        return list(self.layers)[-1](x)[..., 0]


class Heads(nnx.Module):
    """Heads and the small models that decide how many of their tokens to take.

    ``predictor`` is the paper's one linear layer, (M + 1) (k + 1) parameters: a class for every length 0 .. k.
    """

    def __init__(self, config: HeadsConfig, model: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config = config
        self.writers = _make_writers(config, model, rngs, dtype)
        self.predictor = Linear(config.hidden_size, config.k + 1, bias=True, rngs=rngs, dtype=jnp.float32)
        self.gate = Gate(rngs=rngs, dtype=jnp.float32)

    def logits(self, vocabulary: DraftVocabulary, hidden: Float[Array, "*S M"]) -> list[Float[Array, "*S U"]]:
        """What each parallel or residual head says after the same hidden states."""
        assert not isinstance(self.writers, MTP)
        said = [writer(hidden) for writer in self.writers]
        return said if self.config.kind == "parallel" else [vocabulary.logits(own) for own in said]

    @property
    def mtp(self) -> MTP | None:
        """The MTP layer of recurrent heads; None for others, and where the checkpoint's own serves."""
        return self.writers if isinstance(self.writers, MTP) else None

    def lengths(self, hidden: Float[Array, "*S M"]) -> Float[Array, "*S k+1"]:
        """The probability of each length of the run of right heads after these hidden states."""
        return jax.nn.softmax(self.predictor(hidden.astype(jnp.float32)), axis=-1)


def _make_writers(config: HeadsConfig, model: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.List | MTP:
    """One module a head, or the MTP layer that is used for all of them; nothing for the checkpoint's own."""
    make: dict[str, Any] = dict(rngs=rngs, dtype=dtype)
    size, numbers = config.hidden_size, range(config.k)
    if config.kind == "recurrent":
        return MTP(with_mtp(model), **make)
    if config.kind == "parallel":
        return nnx.List([ParallelHead(size, config.draft_vocab or config.vocab_size, **make) for _ in numbers])
    return nnx.List([ResidualHead(size, **make) for _ in numbers if config.kind == "residual"])


def with_mtp(model: ModelConfig) -> ModelConfig:
    """The backbone's description with an MTP layer shaped as its own layers; one that has a head keeps it."""
    if model.has_mtp:
        return model
    feed_forward = "dense" if model.dense is not None else "moe"
    return dataclasses.replace(model, mtp_pattern=("attention", feed_forward))


def features(logits: Float[Array, "*S U"]) -> Float[Array, "*S 3"]:
    """What gates look at: the best probability, its lead over the second, and the entropy in nats."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    best = jnp.exp(jax.lax.top_k(logs, 2)[0])
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
    return jnp.stack([best[..., 0], best[..., 0] - best[..., 1], entropy], axis=-1)
