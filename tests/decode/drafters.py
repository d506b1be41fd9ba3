"""Drafters that no model would have: their drafts come from a table, right or wrong as a test wants them."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from wmtp_jax.cache.ring import DraftRing, allocate_ring
from wmtp_jax.decode.drafter import MTPDrafter
from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class TableDrafter:
    """Drafts ``table[b, p]`` for position p of row b. The table [B, capacity] is the drafter's state."""

    gamma: int

    def start(self, model: Decoder, rows: int, capacity: int, dtype: jnp.dtype) -> Int[Array, "B capacity"]:
        return jnp.zeros((rows, capacity), jnp.int32)

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> Int[Array, "B capacity"]:
        return draft

    def propose(
        self, model: Decoder, state: DecodeState, sampling: Sampling
    ) -> tuple[Int[Array, "B gamma"], Int[Array, "B capacity"]]:
        positions = state.length[:, None] + 1 + jnp.arange(self.gamma)
        return jnp.take_along_axis(state.draft, positions, axis=1, mode="clip"), state.draft


@dataclass(frozen=True, kw_only=True)
class UnwrappedDrafter(MTPDrafter):
    """A windowed draft over a cache that keeps every entry in a slot of its own: what the ring must be equal to."""

    def start(self, model: Decoder, rows: int, capacity: int, dtype: jnp.dtype) -> DraftRing:
        a = model.config.attention
        window = min(self.window, capacity)
        return allocate_ring(
            rows, a.num_kv_heads, a.head_dim, window=window, sink=self.sink, spare=capacity, dtype=dtype
        )


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
