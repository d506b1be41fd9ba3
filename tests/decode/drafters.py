"""Drafters for tests: steered by a table, right or wrong as a test wants them, or over a cache that never wraps."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from pallas_kernels.sink_window_attention import ring_slot
from wmtp_jax.cache.ring import DraftRing, allocate_ring
from wmtp_jax.cache.ring_shape import RingShape
from wmtp_jax.decode.drafter import MTPDrafter
from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder


class Steered(NamedTuple):
    """The head's own ring, kept as if its drafts were used, and the drafts that are used instead."""

    ring: DraftRing
    table: Int[Array, "B capacity"]


@dataclass(frozen=True, kw_only=True)
class SteeredDrafter(MTPDrafter):
    """Drafts ``table[b, p]`` for position p of row b, or what the head drafts where that is negative."""

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> Steered:
        ring = super().start(model, rows, capacity, dtype)
        return Steered(ring, jnp.full((rows, capacity), -1, jnp.int32))

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> Steered:
        return draft._replace(ring=super().prefill(model, draft.ring, hidden, next_tokens, start, prompt_length))

    def propose(self, model: Decoder, state: DecodeState, sampling: Sampling) -> tuple[Int[Array, "B gamma"], Steered]:
        own, ring = super().propose(model, replace(state, draft=state.draft.ring), sampling)
        positions = state.length[:, None] + 1 + jnp.arange(self.gamma)
        steered = jnp.take_along_axis(state.draft.table, positions, axis=1, mode="clip")
        return jnp.where(steered < 0, own, steered), state.draft._replace(ring=ring)


@dataclass(frozen=True, kw_only=True)
class UnwrappedDrafter(MTPDrafter):
    """A windowed draft over a cache that keeps every entry in a slot of its own: what the ring must be equal to."""

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> DraftRing:
        a = model.config.attention
        shape = RingShape(window=min(self.window, capacity), sink=self.sink, spare=capacity)
        return allocate_ring(rows, a.num_kv_heads, a.head_dim, shape, dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StrictRing(DraftRing):
    """Refuses to store two positions in one slot at once: which of them stays would be up to the device.

    It looks at values, so it works only where nothing is compiled.
    """

    def write(self, k, v, positions, valid) -> "StrictRing":
        for row, counts in zip(np.asarray(positions), np.asarray(valid), strict=True):
            slots = np.asarray(ring_slot(row[counts], self.sink, self.keys.shape[2]))
            assert len(set(slots.tolist())) == len(slots), f"positions {row[counts]} share slots {slots}"
        ring = super().write(k, v, positions, valid)
        return StrictRing(ring.keys, ring.values, ring.sink, ring.window)


@dataclass(frozen=True, kw_only=True)
class StrictDrafter(MTPDrafter):
    """The head over a ``StrictRing``."""

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> StrictRing:
        ring = super().start(model, rows, capacity, dtype)
        return StrictRing(ring.keys, ring.values, ring.sink, ring.window)


def oracle_table(prompts: list[list[int]], texts: list[list[int]], capacity: int) -> np.ndarray:
    """The text itself, [B, capacity]: every draft is right as far as the texts go."""
    table = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt, text in zip(table, prompts, texts, strict=True):
        whole = [*prompt, *text][:capacity]
        row[: len(whole)] = whole
    return table


def wrong_table(oracle: np.ndarray, vocab: int) -> np.ndarray:
    """Never the right token."""
    return (oracle + 1) % vocab


def mixed_table(oracle: np.ndarray, vocab: int, rng: np.random.Generator, right: float) -> np.ndarray:
    """Right with probability ``right``, at every position anew."""
    return np.where(rng.random(oracle.shape) < right, oracle, wrong_table(oracle, vocab))
