"""What becomes of a text: how unlikely the backbone finds it, how it repeats itself, how far it is greedy's."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from wmtp_jax.bench.acceptance import first_difference, repeated_share
from wmtp_jax.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What became of the text, over all prompts.

    ``perplexity`` is the backbone's, of the new tokens. ``agreed`` is the mean number of tokens before the first that
    greedy decoding would not have written, and ``same`` the share of texts without one.
    """

    perplexity: float
    repeated_3: float
    repeated_4: float
    distinct_1: float
    distinct_2: float
    agreed: float
    same: float


def quality(
    backbone: Decoder, prompts: Sequence[list[int]], texts: Sequence[list[int]], greedy: Sequence[list[int]]
) -> Quality:
    """Of ``texts`` after ``prompts``, beside what greedy decoding wrote there."""
    differences = [first_difference(a, b) for a, b in zip(greedy, texts, strict=True)]
    agreed = [len(text) if d is None else d for d, text in zip(differences, texts, strict=True)]
    return Quality(
        perplexity=perplexity(backbone, prompts, texts),
        repeated_3=_mean(repeated_share(text, 3) for text in texts),
        repeated_4=_mean(repeated_share(text, 4) for text in texts),
        distinct_1=_mean(1 - repeated_share(text, 1) for text in texts),
        distinct_2=_mean(1 - repeated_share(text, 2) for text in texts),
        agreed=statistics.mean(agreed),
        same=statistics.mean(d is None for d in differences),
    )


def _mean(values: Iterator[float]) -> float:
    """Of those texts that are long enough to tell."""
    told = [value for value in values if not math.isnan(value)]
    return statistics.mean(told) if told else math.nan


def perplexity(backbone: Decoder, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> float:
    """The backbone's perplexity of the texts after their prompts: exp of the mean nats a new token."""
    longest = max(len(p) + len(t) for p, t in zip(prompts, texts, strict=True))
    size = 1 << (longest - 1).bit_length()
    nats, count = 0.0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = np.zeros((1, size), np.int32)
        whole = [*prompt, *text]
        tokens[0, : len(whole)] = whole
        losses = np.asarray(_losses(backbone, jnp.asarray(tokens)))[0]
        nats += float(losses[len(prompt) - 1 : len(whole) - 1].sum())
        count += len(text)
    return math.exp(nats / max(count, 1))


@jax.jit
def _losses(backbone: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    logits = backbone.logits(backbone.sequence(tokens)[:, :-1])
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked
