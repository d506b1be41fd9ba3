"""What it means that two decoding states are the same: equal in everything that will ever be read."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tests.decode.drafters import Steered
from wmtp_jax.cache.paged import PagedCache
from wmtp_jax.cache.ring import DraftRing
from wmtp_jax.decode.drafter import draft_run
from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder

TOLERANCE = 1e-4


def assert_same_target_state(one: DecodeState, other: DecodeState, rows: list[int] | None = None) -> None:
    """Counters, pending token, recurrent and convolution states, and the keys and values of committed positions."""
    rows = list(range(one.length.shape[0])) if rows is None else rows
    for name in ("length", "pending"):
        chex.assert_trees_all_equal(getattr(one, name)[jnp.array(rows)], getattr(other, name)[jnp.array(rows)])
    for state, like in zip(one.recurrent, other.recurrent, strict=True):
        pick = jax.tree.map(lambda x: x[:, jnp.array(rows)], (tuple(state), tuple(like)))
        chex.assert_trees_all_close(*pick, atol=TOLERANCE, rtol=TOLERANCE)
    for row in rows:
        length = int(one.length[row])
        for a, b in zip(
            committed_pages(one.cache, row, length), committed_pages(other.cache, row, length), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE)


def committed_pages(cache: PagedCache, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [layers, length, K, D] of a row's first positions, found through the page table."""
    positions = np.arange(length)
    layers = np.arange(cache.keys.shape[0] // cache.pages)[:, None]
    pages = layers * cache.pages + np.asarray(cache.table)[row, positions // cache.page_size]
    keys, values = np.asarray(cache.keys), np.asarray(cache.values)
    return keys[pages, :, positions % cache.page_size], values[pages, :, positions % cache.page_size]


@partial(jax.jit, static_argnames="gamma")
def _draft(model, state, gamma, sampling):
    return draft_run(model, state, gamma, sampling)


def drafts(
    model: Decoder, state: DecodeState, gamma: int, sampling: Sampling
) -> tuple[Int[Array, "B gamma"], Float[Array, "B gamma V"], DraftRing]:
    """What the head drafts next: tokens, logits, and the ring with their entries."""
    if isinstance(state.draft, Steered):
        state = replace(state, draft=state.draft.ring)
    return _draft(model, state, gamma, sampling)


def assert_same_drafts(
    model: Decoder, one: DecodeState, other: DecodeState, gamma: int, sampling: Sampling, rows: list[int]
) -> None:
    """The same drafts from the same logits, and the same entries at every position that may be read."""
    (tokens, logits, ring), (tokens2, logits2, ring2) = (drafts(model, s, gamma, sampling) for s in (one, other))
    np.testing.assert_array_equal(tokens[jnp.array(rows)], tokens2[jnp.array(rows)])
    np.testing.assert_allclose(logits[jnp.array(rows)], logits2[jnp.array(rows)], atol=TOLERANCE, rtol=TOLERANCE)
    for row in rows:
        length = int(one.length[row])
        for a, b in zip(readable_entries(ring, row, length), readable_entries(ring2, row, length), strict=True):
            np.testing.assert_allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE)


def readable_entries(ring: DraftRing, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [n, K, D] of the committed positions that drafts at ``length`` may read, in order."""
    positions = np.array([p for p in range(length) if p < ring.sink or p >= length - ring.window])
    cycle = ring.keys.shape[2] - ring.sink
    slots = np.where(positions < ring.sink, positions, ring.sink + (positions - ring.sink) % cycle)
    return np.asarray(ring.keys)[row][:, slots].swapaxes(0, 1), np.asarray(ring.values)[row][:, slots].swapaxes(0, 1)
