"""The loop: draft, verify, accept, commit. One jitted program; the host reads tokens every few steps."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from wmtp_jax.cache.paged import PagedCache
from wmtp_jax.decode.drafter import Drafter, Proposing
from wmtp_jax.decode.sampling import Sampling, choose_run
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.layers import rounds_one_vector_otherwise
from wmtp_jax.models.parameters import Packed
from wmtp_jax.models.recurrent import RecurrentRun, commit_run


class Emitted(NamedTuple):
    """What a few steps emitted: the first ``count`` tokens a row.

    ``accepted[n]`` counts a row's steps that emitted n + 1 tokens: n drafts and the target's own next token, unless the
    row's end cut the step short.
    """

    tokens: Int[Array, "B R"]
    count: Int[Array, " B"]
    accepted: Int[Array, " N"]
    steps: Int[Array, ""]


class Verified(NamedTuple):
    """One target forward over a run, not yet committed: its choices, hidden states, recurrent replays and caches."""

    choices: Int[Array, "B N"]
    hidden: Float[Array, "B N M"]
    runs: tuple[RecurrentRun, ...]
    cache: PagedCache


@runtime_checkable
class Stepping(Drafter, Protocol):
    """A drafter with a step of its own, in place of drafting a fixed number of tokens and verifying them all."""

    def step(
        self, model: Decoder, state: DecodeState, sampling: Sampling, stops: Int[Array, "B E"]
    ) -> tuple[DecodeState, Int[Array, "B N"], Int[Array, " B"]]:
        """One step for every row that is not done: the state, tokens, and how many of them a row emits."""
        ...


def step(
    model: Decoder, drafter: Proposing, state: DecodeState, sampling: Sampling, stops: Int[Array, "B E"]
) -> tuple[DecodeState, Int[Array, "B N"], Int[Array, " B"]]:
    """One step for every row that is not done.

    Returns the state, the target's choices [B, N], and how many of them are emitted.
    """
    drafts, draft = drafter.propose(model, state, sampling)
    verified = verify(model, state, drafts, sampling)
    state, count = commit(state, drafts, draft, verified, stops)
    return state, verified.choices, count


def verify(model: Decoder, state: DecodeState, drafts: Int[Array, "B gamma"], sampling: Sampling) -> Verified:
    """One target forward over the pending token and the drafts; recurrent layers are left uncommitted."""
    wanted = drafts.shape[1] + 1
    run = jnp.concatenate([state.pending[:, None], drafts], axis=1)
    if run.size == 1 and rounds_one_vector_otherwise(model.embedding.dtype):
        run = jnp.concatenate([run, run], axis=1)
    offsets = jnp.arange(run.shape[1])
    positions = state.length[:, None] + offsets
    writes = ~state.done[:, None] & (offsets < wanted)

    def attend(cache, layer, q, k, v):
        return cache.attend(layer, q, k, v, state.length, writes)

    hidden, runs, cache = model.hidden_states(run, positions, None, state.recurrent, state.cache, attend)
    hidden = hidden[:, :wanted]
    choices = choose_run(sampling, model.logits(hidden), positions[:, :wanted] + 1, drafts, state.history)
    return Verified(choices, hidden, runs, cache)


def commit(
    state: DecodeState, drafts: Int[Array, "B gamma"], draft: Any, verified: Verified, stops: Int[Array, "B E"]
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Accepts the longest right prefix of the drafts and one token more, and moves every row's state to its end.

    ``draft`` are the drafter's arrays after it proposed. Returns the state and how many choices each row emits.
    """
    choices = verified.choices
    accepted = jnp.cumprod(drafts == choices[:, :-1], axis=1).sum(axis=1).astype(jnp.int32)
    count, stopped = cut(state, choices, accepted, stops)
    emitted = jnp.arange(choices.shape[1]) < count[:, None]
    recurrent = tuple(
        commit_run(old, run, jnp.broadcast_to(count, old.memory.shape[:2]))
        for old, run in zip(state.recurrent, verified.runs, strict=True)
    )
    newest = jnp.take_along_axis(choices, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    remaining = state.remaining - count
    new = replace(
        state,
        cache=verified.cache,
        recurrent=recurrent,
        draft=draft,
        length=state.length + count,
        pending=jnp.where(state.done, state.pending, newest),
        committed=Committed(verified.hidden, choices, count),
        remaining=remaining,
        done=state.done | stopped | (remaining <= 0),
        history=None if state.history is None else state.history.add(choices, emitted),
    )
    return new, count


def cut(
    state: DecodeState, choices: Int[Array, "B N"], accepted: Int[Array, " B"], stops: Int[Array, "B E"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """How many choices are emitted: accepted drafts and one more, up to a stop token or the row's limit."""
    stop = jnp.any(choices[..., None] == stops[:, None, :], axis=-1)
    offsets = jnp.arange(choices.shape[1])
    first_stop = jnp.min(jnp.where(stop, offsets, choices.shape[1]), axis=1)
    count = jnp.minimum(jnp.minimum(accepted + 1, first_stop + 1), state.remaining)
    return jnp.where(state.done, 0, count), first_stop < count


@partial(jax.jit, static_argnames=("drafter", "steps"), donate_argnames="state")
def decode(
    model: Packed[Decoder],
    drafter: Proposing | Stepping,
    state: DecodeState,
    sampling: Sampling,
    stops: Int[Array, "B E"],
    steps: int,
    limit: Int[Array, ""] | None = None,
) -> tuple[DecodeState, Emitted]:
    """Up to ``steps`` steps, fewer when every row is done. The state is donated: its caches are updated in place.

    ``limit``, below ``steps``, makes a call shorter without another program.
    """
    target = model.unpack()
    rows, run = state.pending.shape[0], drafter.gamma + 1

    def running(carry) -> Array:
        state, out = carry
        return (out.steps < (steps if limit is None else limit)) & ~jnp.all(state.done)

    def body(carry):
        state, out = carry
        if isinstance(drafter, Stepping):
            state, choices, count = drafter.step(target, state, sampling, stops)
        else:
            state, choices, count = step(target, drafter, state, sampling, stops)
        offsets = jnp.arange(run)
        # A slot past the buffer is dropped: choices that are not emitted go nowhere.
        slot = jnp.where(offsets < count[:, None], out.count[:, None] + offsets, out.tokens.shape[1])
        tokens = out.tokens.at[jnp.arange(rows)[:, None], slot].set(choices, mode="drop")
        histogram = out.accepted + jnp.sum(count[:, None] - 1 == offsets, axis=0)
        return state, Emitted(tokens, out.count + count, histogram, out.steps + 1)

    empty = Emitted(
        jnp.zeros((rows, steps * run), jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(run, jnp.int32),
        jnp.zeros((), jnp.int32),
    )
    return jax.lax.while_loop(running, body, (state, empty))
