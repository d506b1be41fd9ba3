"""The loop: draft, verify, accept, commit. One jitted program; the host reads tokens every few steps."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from wmtp_jax.cache.paged import PagedCache
from wmtp_jax.decode.drafter import Drafter, Proposing
from wmtp_jax.decode.sampling import MOST_LIKELY, Likely, Sampling, choose_run, likely
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.layers import rounds_one_vector_otherwise
from wmtp_jax.models.parameters import Packed
from wmtp_jax.models.recurrent import RecurrentRun, commit_run


class Emitted(NamedTuple):
    """What a few steps emitted: the first ``count`` tokens a row.

    ``accepted[n]`` counts a row's steps that emitted n + 1 tokens: n drafts and the target's own next token, unless the
    row's end cut the step short. ``drafted`` are the tokens that were an accepted draft: all of a step's but its last,
    which counts as the target's own even where an end cut the step at a draft. ``likely`` comes with
    ``Sampling.logprobs``.
    """

    tokens: Int[Array, "B R"]
    count: Int[Array, " B"]
    accepted: Int[Array, " N"]
    steps: Int[Array, ""]
    drafted: Bool[Array, "B R"]
    likely: Likely | None = None


class Verified(NamedTuple):
    """One target forward over a run, not yet committed: its choices, hidden states, recurrent replays and caches."""

    choices: Int[Array, "B N"]
    hidden: Float[Array, "B N M"]
    runs: tuple[RecurrentRun, ...]
    cache: PagedCache
    likely: Likely | None = None


class Stepped(NamedTuple):
    """What one step of every row comes to: ``tokens`` [B, N], of which a row emits the first ``count``."""

    state: DecodeState
    tokens: Int[Array, "B N"]
    count: Int[Array, " B"]
    likely: Likely | None = None


@runtime_checkable
class Stepping(Drafter, Protocol):
    """A drafter with a step of its own, in place of drafting a fixed number of tokens and verifying them all."""

    def step(self, model: Decoder, state: DecodeState, sampling: Sampling, stops: Int[Array, "B E"]) -> Stepped:
        """One step for every row that is not done."""
        ...


def step(
    model: Decoder, drafter: Proposing, state: DecodeState, sampling: Sampling, stops: Int[Array, "B E"]
) -> Stepped:
    """One step for every row that is not done; its tokens are the target's choices."""
    drafts, draft = drafter.propose(model, state, sampling)
    return conclude(model, replace(state, draft=draft), drafts, sampling, stops)


def conclude(
    model: Decoder,
    state: DecodeState,
    drafts: Int[Array, "B gamma"],
    sampling: Sampling,
    stops: Int[Array, "B E"],
    allowed: UInt32[Array, "B gamma+1 W"] | None = None,
) -> Stepped:
    """The rest of a step once the drafts are there, ``state.draft`` as it is after them."""
    verified = verify(model, state, drafts, sampling, allowed)
    state, count = commit(state, drafts, state.draft, verified, stops)
    return Stepped(state, verified.choices, count, verified.likely)


def verify(
    model: Decoder,
    state: DecodeState,
    drafts: Int[Array, "B gamma"],
    sampling: Sampling,
    allowed: UInt32[Array, "B gamma+1 W"] | None = None,
) -> Verified:
    """One target forward over the pending token and the drafts; recurrent layers are left uncommitted.

    ``allowed`` are the tokens that may follow each of them, as ``choose`` takes them.
    """
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
    logits = model.logits(hidden)
    choices = choose_run(sampling, logits, positions[:, :wanted] + 1, drafts, state.history, allowed)
    return Verified(choices, hidden, runs, cache, likely(logits, choices) if sampling.logprobs else None)


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
            stepped = drafter.step(target, state, sampling, stops)
        else:
            stepped = step(target, drafter, state, sampling, stops)
        return stepped.state, emit(out, stepped)

    return jax.lax.while_loop(running, body, (state, nothing(target, sampling, rows, run, steps)))


def nothing(model: Decoder, sampling: Sampling, rows: int, run: int, steps: int) -> Emitted:
    """Room for what so many steps of ``run`` tokens can emit."""
    room = (rows, steps * run)
    most = min(MOST_LIKELY, model.config.vocab_size)
    empty = Likely(jnp.zeros(room), jnp.zeros((*room, most), jnp.int32), jnp.zeros((*room, most)))
    return Emitted(
        tokens=jnp.zeros(room, jnp.int32),
        count=jnp.zeros(rows, jnp.int32),
        accepted=jnp.zeros(run, jnp.int32),
        steps=jnp.zeros((), jnp.int32),
        drafted=jnp.zeros(room, bool),
        likely=empty if sampling.logprobs else None,
    )


def emit(out: Emitted, stepped: Stepped) -> Emitted:
    """With one more step's tokens behind those of each row."""
    tokens, count = stepped.tokens, stepped.count
    rows, offsets = jnp.arange(len(count))[:, None], jnp.arange(tokens.shape[1])
    # A slot past the buffer is dropped: choices that are not emitted go nowhere.
    slot = jnp.where(offsets < count[:, None], out.count[:, None] + offsets, out.tokens.shape[1])

    def put(old: Array, new: Array) -> Array:
        return old.at[rows, slot].set(new, mode="drop")

    return Emitted(
        tokens=put(out.tokens, tokens),
        count=out.count + count,
        accepted=out.accepted + jnp.sum(count[:, None] - 1 == offsets, axis=0),
        steps=out.steps + 1,
        drafted=put(out.drafted, jnp.broadcast_to(offsets < count[:, None] - 1, tokens.shape)),
        likely=None if out.likely is None else jax.tree.map(put, out.likely, stepped.likely),
    )
