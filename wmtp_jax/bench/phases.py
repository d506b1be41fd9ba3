"""The phases of a step, each repeated in one program so that it can be timed alone.

Every repetition takes something from the one before: XLA moves work that is the same each time out of a loop.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from wmtp_jax.decode.drafter import Drafter, draft_decode, draft_extend
from wmtp_jax.decode.loop import commit, verify
from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import Packed

Phase = Callable[[Decoder, Drafter, DecodeState, Sampling], DecodeState]


def _extend(model: Decoder, drafter: Drafter, state: DecodeState, sampling: Sampling) -> DecodeState:
    tokens = (state.committed.tokens + 1) % model.config.vocab_size
    return replace(state, draft=draft_extend(model, state), committed=replace(state.committed, tokens=tokens))


def _draft(model: Decoder, drafter: Drafter, state: DecodeState, sampling: Sampling) -> DecodeState:
    tokens, _, ring = draft_decode(model, state, state.draft, drafter.gamma, sampling)
    return replace(state, draft=ring, pending=tokens[:, -1])


def _verify(model: Decoder, drafter: Drafter, state: DecodeState, sampling: Sampling) -> DecodeState:
    drafts = (state.pending[:, None] + 1 + jnp.arange(drafter.gamma)) % model.config.vocab_size
    verified = verify(model, state, drafts, sampling)
    committed = replace(state.committed, hidden=verified.hidden)
    return replace(state, cache=verified.cache, pending=verified.choices[:, -1], committed=committed)


def _commit(model: Decoder, drafter: Drafter, state: DecodeState, sampling: Sampling) -> DecodeState:
    """Accepting and committing a run that verification could have left behind."""
    drafts = (state.pending[:, None] + jnp.arange(drafter.gamma)) % model.config.vocab_size
    shapes = jax.eval_shape(lambda: verify(model, state, drafts, sampling)._replace(cache=None))
    made = jax.tree.map(lambda x: jnp.full(x.shape, 0.1, x.dtype), shapes)
    new, _ = commit(state, drafts, state.draft, made._replace(cache=state.cache), jnp.full((drafts.shape[0], 1), -1))
    # The length stays: a phase is timed at one context.
    return replace(new, length=state.length, remaining=state.remaining, pending=new.pending + state.pending)


def _attention(model: Decoder, drafter: Drafter, state: DecodeState, sampling: Sampling) -> DecodeState:
    """The target's attention alone: every layer over the whole context, without projections."""
    a = model.config.attention
    shape = (state.pending.shape[0], drafter.gamma + 1, a.num_heads, a.head_dim)
    q = jnp.broadcast_to(state.pending[:, None, None, None] % 7 + 1.0, shape).astype(model.embedding.dtype)
    layers = model.config.count("attention")
    q = jax.lax.fori_loop(0, layers, lambda layer, q: state.cache.read(layer, q, state.length), q)
    return replace(state, pending=state.pending + (q[:, 0, 0, 0] > 0))


DRAFT_PHASES = ("draft_extend", "draft_decode")
TARGET_PHASES = ("verify", "commit", "attention")
_PHASES: dict[str, Phase] = dict(
    zip((*DRAFT_PHASES, *TARGET_PHASES), (_extend, _draft, _verify, _commit, _attention), strict=True)
)


@partial(jax.jit, static_argnames=("phase", "drafter"), donate_argnames="state")
def run_phase(
    phase: str, model: Packed[Decoder], drafter: Drafter, state: DecodeState, sampling: Sampling, times: Int[Array, ""]
) -> DecodeState:
    """One of ``DRAFT_PHASES`` or ``TARGET_PHASES``, ``times`` times.

    The state is donated, and comes back with its lengths unchanged.
    """
    target = model.unpack()
    return jax.lax.fori_loop(0, times, lambda _, state: _PHASES[phase](target, drafter, state, sampling), state)
