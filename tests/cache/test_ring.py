"""The ring is a full cache with a sink and a window, whatever is accepted and however often it wraps.

What these claims cover of what goes wrong with windowed drafts: lengths at the window's edge, slots that two positions
of one run share, spare slots too few for the number of drafts, and drafted keys that outlive their rejection.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmtp_jax.cache.ring import DraftRing, allocate_ring

ROWS, HEADS, KV_HEADS, SIZE = 3, 4, 2, 6
# Window, sink, drafts a step.
SHAPES = [(1, 0, 1), (1, 3, 2), (2, 0, 8), (5, 9, 3), (7, 1, 5), (16, 4, 7), (33, 2, 4), (6, 6, 6)]


class Entries:
    """Keys and values by position: a cache that never forgets, in float64."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.held: list[np.ndarray] = []

    def add(self, count: int) -> None:
        self.held += list(self.rng.standard_normal((count, 2, KV_HEADS, SIZE)))

    def attend(self, q: np.ndarray, visible: list[np.ndarray]) -> np.ndarray:
        k, v = np.stack(visible, axis=1).repeat(HEADS // KV_HEADS, axis=2)
        scores = np.einsum("hd,phd->hp", q, k) / SIZE**0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.einsum("hp,phd->hd", weights / weights.sum(axis=1, keepdims=True), v)


@partial(jax.jit, donate_argnums=0)
def draft_step(ring: DraftRing, run, count, length, drafted, q):
    """What a draft does to its ring: stores the accepted run, then attends and stores one draft after another."""
    offsets = jnp.arange(run.shape[2])
    ring = ring.write(run[0], run[1], (length - count)[:, None] + offsets, offsets < count[:, None])
    out = []
    for i in range(q.shape[1]):
        at = length[:, None] - 1 + i
        if i:
            ring = ring.write(*drafted[:, :, i - 1 : i], at, jnp.ones_like(at, bool))
        out.append(ring.attend(q[:, i : i + 1], at, length))
    return jnp.concatenate(out, axis=1), ring


def worst_error(window: int, sink: int, gamma: int, spare: int, steps: int, starts: tuple[int, ...]) -> float:
    """Largest difference from a full cache over ``steps`` steps of random acceptance from prompts of these lengths."""
    rng = np.random.default_rng(window + 100 * sink + 10_000 * gamma)
    rows = [Entries(rng) for _ in starts]
    ring = allocate_ring(ROWS, KV_HEADS, SIZE, window=window, sink=sink, spare=spare, dtype=jnp.float32)
    ring = prefill(ring, rows, starts)
    lengths, worst = np.array(starts), 0.0
    for _ in range(steps):
        counts = rng.integers(1, gamma + 2, ROWS)
        run = np.full((2, ROWS, gamma + 1, KV_HEADS, SIZE), 99.0)
        for b, (entries, count) in enumerate(zip(rows, counts, strict=True)):
            entries.add(count)
            run[:, b, :count] = np.stack(entries.held[-count:], axis=1)
        lengths = lengths + counts
        drafted = rng.standard_normal((2, ROWS, max(gamma - 1, 1), KV_HEADS, SIZE))
        q = 2.0 * rng.standard_normal((ROWS, gamma, HEADS, SIZE))
        out, ring = draft_step(ring, *(jnp.asarray(x) for x in (run, counts, lengths, drafted, q)))
        for b, (entries, length) in enumerate(zip(rows, lengths, strict=True)):
            kept = [x for p, x in enumerate(entries.held) if p < sink or p >= length - window]
            for i in range(gamma):
                expected = entries.attend(q[b, i], kept + [drafted[:, b, j] for j in range(i)])
                worst = max(worst, float(np.abs(np.asarray(out[b, i]) - expected).max()))
    return worst


def prefill(ring: DraftRing, rows: list[Entries], lengths: tuple[int, ...]) -> DraftRing:
    """Prompts of these many entries, of which the ring takes what a draft would read."""
    longest = max(lengths)
    stored = np.zeros((2, ROWS, longest, KV_HEADS, SIZE))
    for b, (entries, length) in enumerate(zip(rows, lengths, strict=True)):
        entries.add(length)
        stored[:, b, :length] = np.stack(entries.held, axis=1)
    positions = jnp.broadcast_to(jnp.arange(longest), (ROWS, longest))
    ends = jnp.asarray(lengths)
    wanted = ring.is_read(positions, ends) & (positions < ends[:, None])
    return ring.write(*jnp.asarray(stored), positions, wanted)


@pytest.mark.parametrize(("window", "sink", "gamma"), SHAPES)
def test_the_ring_is_a_full_cache_with_the_same_window(window, sink, gamma):
    """From prompts that end just before, on and just past the length at which the window lets go of a key."""
    starts = tuple(max(1, window + sink + d) for d in (-2, -1, 0))
    assert worst_error(window, sink, gamma, gamma + 1, 150, starts) < 1e-5
    assert worst_error(window, sink, gamma, gamma + 1, 150, (1, 2, 3 * (window + sink) + 5)) < 1e-5


@pytest.mark.parametrize(("window", "sink", "gamma"), [shape for shape in SHAPES if shape[2] > 1])
def test_gamma_minus_one_spare_slots_are_enough_and_one_fewer_is_not(window, sink, gamma):
    """The drafted entries of a step reach gamma - 1 past the committed length, and the window may not give way."""
    starts = (1, window + sink, 3 * (window + sink))
    assert worst_error(window, sink, gamma, gamma - 1, 100, starts) < 1e-5
    assert worst_error(window, sink, gamma, gamma - 2, 100, starts) > 0.1
