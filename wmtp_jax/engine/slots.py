"""The device's side: one state with a slot a request, and programs that take some of them, work, and put back.

A program's shapes are those of its bucket, the number of slots it takes (a power of two), so that few are compiled and
a lone request does not pay for empty slots. Slots past the bucket's requests are done from the start: they write
nothing. The pool of pages belongs to no slot; each call brings the tables of its own.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, UInt32

from wmtp_jax.cache.paged import allocate
from wmtp_jax.decode.drafter import Proposing
from wmtp_jax.decode.loop import Emitted, Stepping, conclude, decode, emit, nothing
from wmtp_jax.decode.prefill import draft_dtype, first_token, read_chunk
from wmtp_jax.decode.sampling import History, Likely, Sampling
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.engine.capped import Capped, Resting
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import Packed


class Snapshot(NamedTuple):
    """What a slot holds after the tokens of some pages, beside those pages: enough to go on from there."""

    recurrent: Any
    draft: Any
    hidden: Array


@dataclass(frozen=True)
class Slots:
    """Programs over a state of ``rows`` slots; ``state`` is given away and taken back at every call.

    ``chunks`` are the sizes in which prompts are read, smallest first: a short one does not pay for a long chunk.
    """

    model: Decoder
    packed: Packed[Decoder]
    drafter: Capped
    rows: int
    chunks: tuple[int, ...]

    def fresh(self, pages: int, page_size: int, positions: int, dtype: DTypeLike) -> DecodeState:
        """Empty slots beside an empty pool; ``positions`` bounds those of any request."""
        model, rows, run = self.model, self.rows, self.drafter.gamma + 1
        pool = allocate(model.config, [pages * page_size], page_size, dtype, model.kernels)
        draft = self.drafter.start(model, rows, positions, draft_dtype(model, dtype))
        vocab = model.config.vocab_size
        return DecodeState(
            cache=replace(pool, table=jnp.zeros((rows, -(-positions // page_size)), jnp.int32)),
            recurrent=model.initial_states(rows),
            draft=draft,
            length=jnp.zeros(rows, jnp.int32),
            pending=jnp.zeros(rows, jnp.int32),
            committed=Committed(
                jnp.zeros((rows, run, model.config.hidden_size), model.embedding.dtype),
                jnp.zeros((rows, run), jnp.int32),
                jnp.zeros(rows, jnp.int32),
            ),
            remaining=jnp.zeros(rows, jnp.int32),
            done=jnp.ones(rows, bool),
            history=History(jnp.zeros((rows, vocab), bool), jnp.zeros((rows, vocab), jnp.int32)),
        )

    def clear(self, state: DecodeState, slot: int, most: int) -> DecodeState:
        """The slot before any token, of a request that takes at most so many drafts a step."""
        return _clear(state, np.int32(slot), np.int32(most))

    def remember(self, state: DecodeState, slot: int, prompt: list[int], emitted: list[int]) -> DecodeState:
        """What penalties of the slot's request look at."""
        vocab = self.model.config.vocab_size
        in_prompt = np.zeros(vocab, bool)
        in_prompt[prompt] = True
        return _remember(state, np.int32(slot), in_prompt, np.bincount(emitted, minlength=vocab).astype(np.int32))

    def keep(self, state: DecodeState, slot: int) -> Snapshot:
        """A copy of what the slot holds."""
        return _keep(state, np.int32(slot))

    def restore(self, state: DecodeState, slot: int, length: int, kept: Snapshot, following: int) -> DecodeState:
        """The slot after the ``length`` tokens that ``kept`` was copied after, with another token behind them."""
        return _restore(self.packed, self.drafter, state, np.int32(slot), np.int32(length), kept, np.int32(following))

    def chunk_for(self, tokens: int) -> int:
        """The size of the chunk in which so many tokens are read, or the first of them."""
        return next((chunk for chunk in self.chunks if tokens <= chunk), self.chunks[-1])

    def read(self, state: DecodeState, slot: int, table: np.ndarray, tokens: list[int], begin: int) -> DecodeState:
        """Reads the chunk of ``tokens`` that begins at position ``begin``."""
        chunk = self.chunk_for(len(tokens) - begin)
        part = np.zeros(chunk + 1, np.int32)
        taken = tokens[begin : begin + chunk + 1]
        part[: len(taken)] = taken
        valid = min(chunk, len(tokens) - begin)
        # Draft entries are stored as if the prompt ended with each chunk: the ring then serves whoever goes on there.
        seen = min(begin + valid + 1, len(tokens))
        return _read(self.packed, self.drafter, state, np.int32(slot), table, part, np.int32(valid), np.int32(seen))

    def begin(
        self,
        state: DecodeState,
        slot: int,
        remaining: int,
        sampling: Sampling,
        stops: np.ndarray,
        known: int | None,
        allowed: np.ndarray | None = None,
    ) -> tuple[DecodeState, int, Likely | None]:
        """The first token after what was read, or the ``known`` one; ``remaining`` counts it."""
        if allowed is not None:
            allowed = allowed[None]
        known = -1 if known is None else known
        state, found = _begin(
            self.packed, state, np.int32(slot), np.int32(remaining), sampling, stops, np.int32(known), allowed
        )
        token, likely = jax.device_get(found)
        return state, int(token), likely

    def run(
        self,
        state: DecodeState,
        slots: list[int],
        tables: np.ndarray,
        sampling: Sampling,
        stops: np.ndarray,
        steps: int,
        *,
        drafting: bool = True,
    ) -> tuple[DecodeState, Emitted]:
        """Some steps of these slots; entries past ``rows`` are none. What is emitted comes as host arrays."""
        drafter = self.drafter if drafting else Resting(drafter=self.drafter)
        state, emitted = _run(self.packed, drafter, state, np.array(slots, np.int32), tables, sampling, stops, steps)
        return state, jax.device_get(emitted)

    def propose(
        self, state: DecodeState, slots: list[int], tables: np.ndarray, sampling: Sampling
    ) -> tuple[DecodeState, np.ndarray]:
        """The first half of one step: drafts [b, gamma] of these slots."""
        state, drafts = _propose(self.packed, self.drafter, state, np.array(slots, np.int32), tables, sampling)
        return state, jax.device_get(drafts)

    def verify(
        self,
        state: DecodeState,
        slots: list[int],
        tables: np.ndarray,
        drafts: np.ndarray,
        allowed: np.ndarray,
        sampling: Sampling,
        stops: np.ndarray,
    ) -> tuple[DecodeState, Emitted]:
        """The second half, where ``allowed`` [b, gamma + 1, W] may follow the pending token and each draft."""
        state, emitted = _verify(
            self.packed, state, np.array(slots, np.int32), tables, drafts, allowed, sampling, stops
        )
        return state, jax.device_get(emitted)


def take_slots(state: DecodeState, slots: Int[Array, " b"], table: Int[Array, "b n"], penalized: bool) -> DecodeState:
    """A batch of some slots. Those that are none come out done."""
    rows = len(state.pending)

    def pick(axis: int, tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.take(x, slots, axis=axis, mode="clip"), tree)

    return DecodeState(
        cache=replace(state.cache, table=table),
        recurrent=pick(1, state.recurrent),
        draft=pick(0, state.draft),
        length=pick(0, state.length),
        pending=pick(0, state.pending),
        committed=pick(0, state.committed),
        remaining=pick(0, state.remaining),
        done=slots >= rows,
        history=pick(0, state.history) if penalized else None,
    )


def put_slots(state: DecodeState, slots: Int[Array, " b"], batch: DecodeState) -> DecodeState:
    """The state with a batch put back."""

    def put(axis: int, tree: Any, new: Any) -> Any:
        at = (slice(None),) * axis + (slots,)
        return jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), tree, new)

    history = state.history if batch.history is None else put(0, state.history, batch.history)
    return DecodeState(
        cache=replace(batch.cache, table=state.cache.table),
        recurrent=put(1, state.recurrent, batch.recurrent),
        draft=put(0, state.draft, batch.draft),
        length=put(0, state.length, batch.length),
        pending=put(0, state.pending, batch.pending),
        committed=put(0, state.committed, batch.committed),
        remaining=put(0, state.remaining, batch.remaining),
        done=put(0, state.done, batch.done),
        history=history,
    )


@partial(jax.jit, donate_argnames="state")
def _clear(state: DecodeState, slot: Array, most: Array) -> DecodeState:
    draft = state.draft
    return replace(
        state,
        recurrent=jax.tree.map(lambda x: x.at[:, slot].set(0), state.recurrent),
        draft=replace(draft, most=draft.most.at[slot].set(most)),
        length=state.length.at[slot].set(0),
    )


@partial(jax.jit, donate_argnames="state")
def _remember(state: DecodeState, slot: Array, in_prompt: Array, emitted: Array) -> DecodeState:
    history = state.history
    assert history is not None
    return replace(
        state, history=History(history.in_prompt.at[slot].set(in_prompt), history.emitted.at[slot].set(emitted))
    )


@jax.jit
def _keep(state: DecodeState, slot: Array) -> Snapshot:
    return Snapshot(
        jax.tree.map(lambda x: x[:, slot], state.recurrent),
        jax.tree.map(lambda x: x[slot], state.draft.draft),
        state.committed.hidden[slot, 0],
    )


@partial(jax.jit, static_argnames="drafter", donate_argnames="state")
def _restore(
    model: Packed[Decoder],
    drafter: Proposing,
    state: DecodeState,
    slot: Array,
    length: Array,
    kept: Snapshot,
    following: Array,
) -> DecodeState:
    recurrent = jax.tree.map(lambda x, y: x.at[:, slot].set(y), state.recurrent, kept.recurrent)
    draft = jax.tree.map(lambda x, y: x.at[slot].set(y), state.draft.draft, kept.draft)
    hidden = state.committed.hidden.at[slot, 0].set(kept.hidden)
    state = replace(
        state,
        recurrent=recurrent,
        draft=replace(state.draft, draft=draft),
        length=state.length.at[slot].set(length),
        committed=replace(state.committed, hidden=hidden),
    )
    # The last kept token's draft entry is made with the token behind it, which is this request's own.
    slots = slot[None]
    batch = take_slots(state, slots, state.cache.table[slots], penalized=False)
    last = (kept.hidden[None, None], following[None, None], length[None] - 1, length[None] + 1)
    return put_slots(state, slots, replace(batch, draft=drafter.prefill(model.unpack(), batch.draft, *last)))


@partial(jax.jit, static_argnames="drafter", donate_argnames="state")
def _read(
    model: Packed[Decoder],
    drafter: Proposing,
    state: DecodeState,
    slot: Array,
    table: Array,
    tokens: Array,
    valid: Array,
    seen: Array,
) -> DecodeState:
    slots = slot[None]
    batch = take_slots(state, slots, table[None], penalized=False)
    batch = read_chunk(model.unpack(), drafter, batch, tokens[None, :-1], tokens[None, 1:], valid[None], seen[None])
    return put_slots(state, slots, batch)


@partial(jax.jit, donate_argnames="state")
def _begin(
    model: Packed[Decoder],
    state: DecodeState,
    slot: Array,
    remaining: Array,
    sampling: Sampling,
    stops: Array,
    known: Array,
    allowed: UInt32[Array, "1 W"] | None,
) -> tuple[DecodeState, tuple[Array, Likely | None]]:
    slots = slot[None]
    batch = take_slots(state, slots, state.cache.table[slots], sampling.penalized)
    batch = replace(batch, remaining=remaining[None])
    batch, likely = first_token(model.unpack(), batch, sampling, stops, known[None], allowed)
    return put_slots(state, slots, batch), (batch.pending[0], likely)


@partial(jax.jit, static_argnames=("drafter", "steps"), donate_argnames="state")
def _run(
    model: Packed[Decoder],
    drafter: Proposing | Stepping,
    state: DecodeState,
    slots: Array,
    tables: Array,
    sampling: Sampling,
    stops: Array,
    steps: int,
) -> tuple[DecodeState, Emitted]:
    batch, emitted = decode(
        model, drafter, take_slots(state, slots, tables, sampling.penalized), sampling, stops, steps
    )
    return put_slots(state, slots, batch), emitted


@partial(jax.jit, static_argnames="drafter", donate_argnames="state")
def _propose(
    model: Packed[Decoder], drafter: Proposing, state: DecodeState, slots: Array, tables: Array, sampling: Sampling
) -> tuple[DecodeState, Array]:
    batch = take_slots(state, slots, tables, sampling.penalized)
    drafts, draft = drafter.propose(model.unpack(), batch, sampling)
    return put_slots(state, slots, replace(batch, draft=draft)), drafts


@partial(jax.jit, donate_argnames="state")
def _verify(
    model: Packed[Decoder],
    state: DecodeState,
    slots: Array,
    tables: Array,
    drafts: Int[Array, "b gamma"],
    allowed: UInt32[Array, "b N W"],
    sampling: Sampling,
    stops: Array,
) -> tuple[DecodeState, Emitted]:
    batch, target = take_slots(state, slots, tables, sampling.penalized), model.unpack()
    stepped = conclude(target, batch, drafts, sampling, stops, allowed)
    rows, run = stepped.tokens.shape
    return put_slots(state, slots, stepped.state), emit(nothing(target, sampling, rows, run, 1), stepped)
