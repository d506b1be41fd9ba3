"""What the target emits at a position, as a function of its logits, the request's seed and the position alone.

At temperature 0 that is the argmax; otherwise the argmax of logits plus Gumbel noise keyed by (seed, position), which
samples exactly from the softmax. A draft is accepted when it equals this choice, so the text cannot depend on how, or
whether, it was drafted; and a drafter that adds the same noise to its own logits agrees more often.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from wmtp_jax.decode.sampling_params import SamplingParams

# As many as the OpenAI API can ask for.
MOST_LIKELY = 20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """A batch's sampling parameters, one entry a row. The static flags leave unused work out of the program."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    seed: UInt32[Array, " B"]
    stochastic: bool = field(metadata={"static": True})
    filtered: bool = field(metadata={"static": True})
    penalized: bool = field(metadata={"static": True})
    logprobs: bool = field(metadata={"static": True}, default=False)


def batch_sampling(rows: Sequence[SamplingParams]) -> Sampling:
    """Stacks the rows' parameters."""

    def column(name: str, dtype: type) -> Array:
        return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

    return Sampling(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition=column("repetition_penalty", np.float32),
        presence=column("presence_penalty", np.float32),
        frequency=column("frequency_penalty", np.float32),
        seed=column("seed", np.uint32),
        stochastic=any(row.temperature > 0 for row in rows),
        filtered=any(row.temperature > 0 and row.filters for row in rows),
        penalized=any(row.penalizes for row in rows),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class History:
    """What penalties look at: tokens of the prompt, and how often each was emitted since."""

    in_prompt: Bool[Array, "B V"]
    emitted: Int[Array, "B V"]

    def add(self, tokens: Int[Array, "B T"], counts: Bool[Array, "B T"]) -> "History":
        """With more emitted tokens, those where ``counts``."""
        rows = jnp.arange(tokens.shape[0])[:, None]
        return History(self.in_prompt, self.emitted.at[rows, tokens].add(counts.astype(self.emitted.dtype)))


def start_history(prompts: Sequence[Sequence[int]], vocab_size: int) -> History:
    """The history before the first emitted token."""
    in_prompt = np.zeros((len(prompts), vocab_size), bool)
    for row, prompt in zip(in_prompt, prompts, strict=True):
        row[np.asarray(prompt, np.int64)] = True
    return History(jnp.asarray(in_prompt), jnp.zeros(in_prompt.shape, jnp.int32))


def choose(
    sampling: Sampling,
    logits: Float[Array, "B V"],
    positions: Int[Array, " B"],
    history: History | None,
    allowed: UInt32[Array, "B W"] | None = None,
) -> Int[Array, " B"]:
    """The token emitted at each row's position. ``allowed`` has a bit for each that may be, lowest first; None is all.

    ``W`` is at least ``V / 32``.
    """
    if history is not None:
        logits = _penalize(sampling, logits, history)
    if allowed is not None:
        logits = jnp.where(_bits(allowed, logits.shape[-1]), logits, -jnp.inf)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not sampling.stochastic:
        return greedy
    # Shifted first: a tiny temperature must not overflow.
    shifted = logits - logits.max(axis=-1, keepdims=True)
    scaled = shifted / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None]
    if sampling.filtered:
        scaled = _filter(sampling, scaled)
    sampled = jnp.argmax(scaled + _gumbel(sampling.seed, positions, logits.shape[-1]), axis=-1).astype(jnp.int32)
    return jnp.where(sampling.temperature > 0, sampled, greedy)


def choose_run(
    sampling: Sampling,
    logits: Float[Array, "B N V"],
    positions: Int[Array, "B N"],
    drafts: Int[Array, "B N-1"],
    history: History | None,
    allowed: UInt32[Array, "B N W"] | None = None,
) -> Int[Array, "B N"]:
    """The target's choice after each token of a verified run; choice j's penalties see the j drafts before it."""
    choices = []
    for j in range(logits.shape[1]):
        if j and history is not None:
            history = history.add(drafts[:, j - 1 : j], jnp.ones_like(drafts[:, :1], bool))
        bits = None if allowed is None else allowed[:, j]
        choices.append(choose(sampling, logits[:, j], positions[:, j], history, bits))
    return jnp.stack(choices, axis=1)


class Likely(NamedTuple):
    """The target's own log-probabilities (natural, before penalties, temperature and filters).

    Those of the chosen tokens, and the K most probable tokens with theirs, best first.
    """

    chosen: Float[Array, "B N"]
    ids: Int[Array, "B N K"]
    values: Float[Array, "B N K"]


def likely(logits: Float[Array, "B N V"], chosen: Int[Array, "B N"]) -> Likely:
    """Of at most ``MOST_LIKELY`` tokens."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    values, ids = jax.lax.top_k(logprobs, min(MOST_LIKELY, logits.shape[-1]))
    return Likely(jnp.take_along_axis(logprobs, chosen[..., None], axis=-1)[..., 0], ids, values)


def _bits(words: UInt32[Array, "B W"], count: int) -> Bool[Array, "B V"]:
    spread = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return spread.reshape(words.shape[0], -1)[:, :count].astype(bool)


def _penalize(sampling: Sampling, logits: Float[Array, "B V"], history: History) -> Float[Array, "B V"]:
    seen = history.in_prompt | (history.emitted > 0)
    factor = sampling.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    logits = logits - sampling.frequency[:, None] * history.emitted
    return logits - sampling.presence[:, None] * (history.emitted > 0)


def _filter(sampling: Sampling, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Minus infinity outside top-k, then outside the top-p nucleus of what is left, then under min-p."""
    ordered = -jnp.sort(-logits, axis=-1)
    vocab = logits.shape[-1]
    kept = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)[:, None]
    ordered = jnp.where(jnp.arange(vocab) < kept, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The running sum reaches 1 before its end: a nucleus of everything must not depend on it.
    inside = (before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1)
    nucleus = inside & jnp.isfinite(ordered)
    nucleus &= probabilities >= sampling.min_p[:, None] * probabilities[:, :1]
    floor = jnp.min(jnp.where(nucleus, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= floor, logits, -jnp.inf)


def _gumbel(seed: UInt32[Array, " B"], positions: Int[Array, " B"], vocab: int) -> Float[Array, "B V"]:
    def row(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position), (vocab,))

    return jax.vmap(row)(seed, positions)
