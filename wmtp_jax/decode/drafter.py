"""Who proposes the tokens that the target verifies. A drafter can change the speed, never the text."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.cache.ring import DraftRing, allocate_ring
from wmtp_jax.cache.ring_shape import ring_shape
from wmtp_jax.decode.sampling import Sampling, choose
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.mtp import MTP


class Drafter(Protocol):
    """Static (hashable) description of a way to draft; its arrays live in ``DecodeState.draft``."""

    @property
    def gamma(self) -> int:
        """Drafted tokens a step, 0 for plain decoding."""
        ...

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> Any:
        """The drafter's arrays before any token; ``capacity`` bounds positions of any row."""
        ...

    def prefill(
        self,
        model: Decoder,
        draft: Any,
        hidden: Float[Array, "B T M"],
        next_tokens: Int[Array, "B T"],
        start: Int[Array, " B"],
        prompt_length: Int[Array, " B"],
    ) -> Any:
        """Takes in a chunk of the prompt at positions ``start ..`` with the tokens that follow each position."""
        ...


class Proposing(Drafter, Protocol):
    """A drafter of a fixed number of tokens a step, all of which are verified."""

    def propose(self, model: Decoder, state: DecodeState, sampling: Sampling) -> tuple[Int[Array, "B gamma"], Any]:
        """Drafts for positions ``length + 1 ..`` and the drafter's new arrays."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plain:
    """No drafts: ordinary decoding in the same loop."""

    @property
    def gamma(self) -> int:
        return 0

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> None:
        return None

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> None:
        return None

    def propose(self, model: Decoder, state: DecodeState, sampling: Sampling) -> tuple[Int[Array, "B 0"], None]:
        return jnp.zeros((state.pending.shape[0], 0), jnp.int32), None


@dataclass(frozen=True, kw_only=True)
class MTPDrafter:
    """The checkpoint's own head, used recurrently, over a sink of ``sink`` and a window of ``window`` entries.

    ``window=0`` is native MTP: the head reads every entry.
    """

    gamma: int
    window: int = 0
    sink: int = 0

    def __post_init__(self) -> None:
        if min(self.gamma - 1, self.window, self.sink) < 0:
            raise UserError(f"gamma={self.gamma}, window={self.window}, sink={self.sink}: must not be negative")
        if self.sink and not self.window:
            raise UserError(f"sink={self.sink} needs a window: give --window, or --sink 0 for the native draft")

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> DraftRing:
        if model.mtp is None:
            raise UserError("this checkpoint has no MTP head to draft with: use --gamma 0")
        a, shape = model.config.attention, ring_shape(self.window, self.sink, self.gamma, capacity)
        return allocate_ring(rows, a.num_kv_heads, a.head_dim, shape, dtype, model.kernels)

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> DraftRing:
        """Stores the chunk's entries that a draft at the prompt's end would read, and skips the others.

        The head's keys and values do not depend on its own attention, so an entry that is never read need not exist:
        O(window + sink) work for a prompt of any length. The entry of the last prompt token waits for the first
        emitted token.
        """
        mtp = _head(model)
        positions = start[:, None] + jnp.arange(hidden.shape[1])
        wanted = (positions < prompt_length[:, None] - 1) & draft.is_read(positions, prompt_length)

        def store(ring: DraftRing) -> DraftRing:
            entries = mtp.entries(hidden, model.embed(next_tokens))
            return ring.write(*mtp.keys_values(entries, positions), positions, wanted)

        return jax.lax.cond(jnp.any(wanted), store, lambda ring: ring, draft)

    def propose(
        self, model: Decoder, state: DecodeState, sampling: Sampling
    ) -> tuple[Int[Array, "B gamma"], DraftRing]:
        """Draft-extend over the committed entries, then ``gamma`` recurrent steps."""
        tokens, _, ring = draft_run(model, state, self.gamma, sampling)
        return tokens, ring


def draft_run(
    model: Decoder, state: DecodeState, gamma: int, sampling: Sampling
) -> tuple[Int[Array, "B gamma"], Float[Array, "B gamma V"], DraftRing]:
    """Drafted tokens, the logits they were chosen from, and the ring with all their entries."""
    return draft_decode(model, state, draft_extend(model, state), gamma, sampling)


def draft_decode(
    model: Decoder, state: DecodeState, ring: DraftRing, gamma: int, sampling: Sampling
) -> tuple[Int[Array, "B gamma"], Float[Array, "B gamma V"], DraftRing]:
    """``gamma`` recurrent steps after the entries of the last run are stored. The same values as ``draft_run``."""
    mtp = _head(model)
    run, length = state.committed, state.length
    newest = jnp.maximum(run.count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(run.hidden, newest, axis=1)

    def step(carry, _):
        ring, hidden, token, position, history = carry
        entry = mtp.entries(hidden, model.embed(token[:, None]))
        at = position[:, None]
        ring = ring.write(*mtp.keys_values(entry, at), at, jnp.ones_like(at, bool))
        hidden = mtp.outputs(entry, at, lambda q: ring.attend(q, at, length))
        logits = model.draft_logits(hidden)[:, 0]
        token = choose(sampling, logits, position + 2, history)
        if history is not None:
            history = history.add(token[:, None], jnp.ones_like(at, bool))
        return (ring, hidden, token, position + 1, history), (token, logits)

    carry = (ring, hidden, state.pending, length - 1, state.history)
    (ring, *_), (tokens, logits) = jax.lax.scan(step, carry, None, length=gamma)
    return tokens.T, jnp.moveaxis(logits, 0, 1), ring


def draft_extend(model: Decoder, state: DecodeState) -> DraftRing:
    """Stores the entries of the last run, from true target hidden states, over what was drafted in their place."""
    mtp, run = _head(model), state.committed
    offsets = jnp.arange(run.tokens.shape[1])
    positions = (state.length - run.count)[:, None] + offsets
    entries = mtp.entries(run.hidden, model.embed(run.tokens))
    # A run accepted whole can be longer than a small ring: two entries must not meet in one slot.
    wanted = (offsets < run.count[:, None]) & state.draft.is_read(positions, state.length)
    return state.draft.write(*mtp.keys_values(entries, positions), positions, wanted)


def _head(model: Decoder) -> MTP:
    assert model.mtp is not None
    return model.mtp
