"""Tiny backbones with heads drawn at random, of every kind."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.clp.config import HeadsConfig, Kind, fingerprint
from wmtp_jax.clp.heads import Heads
from wmtp_jax.clp.store import attach, draft_vocabulary
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import named_parameters, with_parameters


def heads_config(model: Decoder, kind: Kind, k: int, *, draft_vocab: int = 0, competing: bool = False) -> HeadsConfig:
    """A description that fits the model."""
    return HeadsConfig(
        kind=kind,
        k=k,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        fingerprint=fingerprint(model),
        draft_vocab=draft_vocab,
        competing=competing,
    )


def random_heads(config: HeadsConfig, model: Decoder, seed: int) -> Heads:
    """Heads with every parameter drawn from ``seed``, norms and biases among them."""
    rng = np.random.default_rng(seed)
    heads = Heads(config, model.config, rngs=nnx.Rngs(seed))
    drawn = {}
    for name, value in named_parameters(heads).items():
        noise = rng.standard_normal(value.shape)
        if "norm" in name:
            drawn[name] = 1 + 0.3 * noise
        else:
            drawn[name] = noise / (value.shape[-2] ** 0.5 if value.ndim > 1 else 2)
    return with_parameters(heads, {name: jnp.asarray(value, jnp.float32) for name, value in drawn.items()})


def with_random_heads(
    name: str, kind: Kind, k: int, seed: int, *, draft_vocab: int = 0, competing: bool = False, unrolled: bool = False
) -> Decoder:
    """The tiny model ``name`` with heads; the smaller vocabulary is drawn at random."""
    model = tiny_model(name, seed, unrolled=unrolled)
    config = heads_config(model, kind, k, draft_vocab=draft_vocab, competing=competing)
    # Compiled in, as all of a description is: with one for all weights, they share programs.
    config = replace(config, fingerprint="any")
    ids = np.sort(np.random.default_rng(seed).permutation(CONFIGS[name].vocab_size)[:draft_vocab]).astype(np.int32)
    vocabulary = draft_vocabulary(model, ids if draft_vocab else None)
    return attach(model, random_heads(config, model, seed), vocabulary)
