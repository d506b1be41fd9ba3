"""Decoding that trusts its heads: what they write is emitted unverified, and changes the text.

A step is one backbone forward over the tokens taken last time, 1 to k + 1 of them. The backbone's own head writes the
first token after them, the heads the next ones, and a rule says how many of those are taken (CLP, arXiv 2606.10935).
No verifier looks at them: they are simply what the next step reads, so every cache holds the text that was emitted.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.clp.drafter import drafted, newest_hidden
from wmtp_jax.clp.rules import Rule, span
from wmtp_jax.decode.drafter import MTPDrafter, Proposing, draft_extend
from wmtp_jax.decode.loop import Stepped, cut
from wmtp_jax.decode.sampling import Sampling, choose
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.recurrent import commit_run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trusted:
    """The heads' own arrays, and the tokens after the pending one that were emitted with it: the first ``count``."""

    draft: Any
    tokens: Int[Array, "B k"]
    count: Int[Array, " B"]


@dataclass(frozen=True, kw_only=True)
class Trusting:
    """A drafter whose tokens are taken by a rule. Its step verifies nothing."""

    drafter: Proposing
    rule: Rule
    tau: float = 0.0

    @property
    def gamma(self) -> int:
        return self.drafter.gamma

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> Trusted:
        inner = self.drafter.start(model, rows, capacity, dtype)
        return Trusted(inner, jnp.zeros((rows, self.gamma), jnp.int32), jnp.zeros(rows, jnp.int32))

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> Trusted:
        return replace(draft, draft=self.drafter.prefill(model, draft.draft, hidden, next_tokens, start, prompt_length))

    def take(
        self, model: Decoder, state: DecodeState, tokens: Int[Array, "B k"], logits: Float[Array, "B k V"]
    ) -> Int[Array, " B"]:
        """How many of the heads' tokens to take, by the rule."""
        return span(self.rule, self.tau, model.heads, newest_hidden(state), logits)

    def step(self, model: Decoder, state: DecodeState, sampling: Sampling, stops: Int[Array, "B E"]) -> Stepped:
        """One step for every row that is not done."""
        state = replace(state, draft=replace(state.draft, draft=self._stored(model, state)))
        read = _read(model, state)
        first = _first(model, read, sampling)
        read = _pending(read, first)
        tokens, logits, draft = drafted(model, self.drafter, replace(read, draft=state.draft.draft), sampling)
        taken = self.take(model, read, tokens, logits)
        written = jnp.concatenate([first[:, None], tokens], axis=1)
        count, stopped = cut(read, written, taken, stops)
        emitted = jnp.arange(written.shape[1]) < count[:, None]
        remaining = state.remaining - count
        new = replace(
            read,
            draft=Trusted(
                draft,
                jnp.where(state.done[:, None], state.draft.tokens, tokens),
                jnp.where(state.done, state.draft.count, count - 1),
            ),
            pending=jnp.where(state.done, state.pending, first),
            remaining=remaining,
            done=state.done | stopped | (remaining <= 0),
            history=None if state.history is None else state.history.add(written, emitted),
        )
        return Stepped(new, written, count)

    def _stored(self, model: Decoder, state: DecodeState) -> Any:
        """An MTP head's entries of the last committed run, before another takes its place.

        Only the entry of a prompt's last token can be missing: it waits for the token that follows.
        """
        if not isinstance(self.drafter, MTPDrafter):
            return state.draft.draft
        return draft_extend(model, replace(state, draft=state.draft.draft))


def _read(model: Decoder, state: DecodeState) -> DecodeState:
    """The backbone over the tokens that were emitted last, all of which are committed."""
    block = jnp.concatenate([state.pending[:, None], state.draft.tokens], axis=1)
    offsets = jnp.arange(block.shape[1])
    given = jnp.where(state.done, 0, 1 + state.draft.count)
    counts = offsets < given[:, None]

    def attend(cache, layer, q, k, v):
        return cache.attend(layer, q, k, v, state.length, counts)

    positions = state.length[:, None] + offsets
    hidden, runs, cache = model.hidden_states(block, positions, None, state.recurrent, state.cache, attend)
    recurrent = tuple(
        commit_run(old, run, jnp.broadcast_to(given, old.memory.shape[:2]))
        for old, run in zip(state.recurrent, runs, strict=True)
    )
    following = jnp.roll(block, -1, axis=1)
    return replace(
        state,
        cache=cache,
        recurrent=recurrent,
        length=state.length + given,
        committed=Committed(hidden, following, given),
    )


def _first(model: Decoder, state: DecodeState, sampling: Sampling) -> Int[Array, " B"]:
    """The backbone's own next token, or that of a head which competes with it and is surer of its own."""
    hidden = newest_hidden(state)
    logits = model.logits(hidden[:, None])[:, 0]
    heads, vocabulary = model.heads, model.draft_vocabulary
    if heads is not None and heads.config.competing:
        assert vocabulary is not None
        other = vocabulary.spread(heads.logits(vocabulary, hidden)[0])
        surer = jax.nn.softmax(other).max(axis=-1) > jax.nn.softmax(logits).max(axis=-1)
        logits = jnp.where(surer[:, None], other, logits)
    return choose(sampling, logits, state.length, state.history)


def _pending(state: DecodeState, first: Int[Array, " B"]) -> DecodeState:
    """The state as a drafter sees it: the new token is pending, and follows the last committed position."""
    rows, last = jnp.arange(len(first)), jnp.maximum(state.committed.count - 1, 0)
    tokens = state.committed.tokens.at[rows, last].set(first)
    history = state.history
    if history is not None:
        history = history.add(first[:, None], ~state.done[:, None])
    return replace(state, pending=first, committed=replace(state.committed, tokens=tokens), history=history)
