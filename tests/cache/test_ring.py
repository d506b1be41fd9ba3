"""The ring is a full cache with a sink and a window, whatever is accepted and however often it wraps.

What these claims cover of what goes wrong with windowed drafts: lengths at the window's edge, slots that two positions
of one run share, spare slots too few for the number of drafts, and drafted keys that outlive their rejection.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from wmtp_jax.cache.ring import DraftRing, allocate_ring
from wmtp_jax.cache.ring_shape import RingShape

ROWS, HEADS, KV_HEADS, SIZE = 3, 4, 2, 6
STEPS = 150
# Window, sink, drafts a step.
SHAPES = [(1, 0, 1), (1, 3, 2), (2, 0, 8), (5, 9, 3), (7, 1, 5), (16, 4, 7), (33, 2, 4), (6, 6, 6)]


class Steps(NamedTuple):
    """What happens to the ring at each step: a run is committed, then drafts are stored and attend, one by one."""

    run: Float[Array, "steps 2 B N K D"]
    count: Int[Array, "steps B"]
    length: Int[Array, "steps B"]
    drafted: Float[Array, "steps gamma 2 B 1 K D"]
    q: Float[Array, "steps gamma B 1 H D"]


@jax.jit
def attend_through_ring(
    ring: DraftRing, prompt: Float[Array, "2 B T K D"], prompt_length: Int[Array, " B"], steps: Steps
) -> Float[Array, "steps gamma B 1 H D"]:
    """What every draft of every step reads from a ring that has taken what a draft would read of the prompts."""
    positions = jnp.broadcast_to(jnp.arange(prompt.shape[2]), prompt.shape[1:3])
    wanted = ring.is_read(positions, prompt_length) & (positions < prompt_length[:, None])
    ring = ring.write(*prompt, positions, wanted)

    def step(ring, xs):
        offsets = jnp.arange(xs.run.shape[2])
        positions = (xs.length - xs.count)[:, None] + offsets
        # Of a run longer than the ring only what the drafts read is stored: no slot twice.
        ring = ring.write(*xs.run, positions, (offsets < xs.count[:, None]) & ring.is_read(positions, xs.length))

        def draft(carry, entry):
            ring, at = carry
            # The first draft's entry is the last committed one, which is there already.
            ring = ring.write(*entry[0], at, at >= xs.length[:, None])
            return (ring, at + 1), ring.attend(entry[1], at, xs.length)

        (ring, _), out = jax.lax.scan(draft, (ring, xs.length[:, None] - 1), (xs.drafted, xs.q))
        return ring, out

    return jax.lax.scan(step, ring, steps)[1]


def attend(q: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Softmax attention in float64: q [H, D] over visible [p, 2, K, D]."""
    k, v = visible.swapaxes(0, 1).repeat(HEADS // KV_HEADS, axis=2)
    scores = np.einsum("hd,phd->hp", q, k) / SIZE**0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hp,phd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def worst_error(window: int, sink: int, gamma: int, spare: int, starts: tuple[int, ...]) -> float:
    """Largest difference from a full cache, over steps of random acceptance after prompts of these lengths."""
    rng = np.random.default_rng(window + 100 * sink + 10_000 * gamma)
    counts = rng.integers(1, gamma + 2, (STEPS, ROWS))
    lengths = np.array(starts) + np.cumsum(counts, axis=0)
    entries = rng.standard_normal((ROWS, lengths.max(), 2, KV_HEADS, SIZE))
    run = np.full((STEPS, 2, ROWS, gamma + 1, KV_HEADS, SIZE), 99.0)
    for t, b in np.ndindex(counts.shape):
        run[t, :, b, : counts[t, b]] = entries[b, lengths[t, b] - counts[t, b] : lengths[t, b]].swapaxes(0, 1)
    drafted = rng.standard_normal((STEPS, gamma, 2, ROWS, 1, KV_HEADS, SIZE))
    q = 2.0 * rng.standard_normal((STEPS, gamma, ROWS, 1, HEADS, SIZE))
    ring = allocate_ring(ROWS, KV_HEADS, SIZE, RingShape(window, sink, spare), jnp.float32)
    prompt = entries[:, : 4 * (window + sink) + 9].transpose(2, 0, 1, 3, 4)
    steps = Steps(*(x.astype(np.float32 if x.dtype == float else np.int32) for x in (run, counts, lengths, drafted, q)))
    got = np.asarray(attend_through_ring(ring, np.float32(prompt), np.array(starts, np.int32), steps))

    worst = 0.0
    for t, b in np.ndindex(counts.shape):
        length = lengths[t, b]
        positions = np.arange(length)
        kept = entries[b, :length][(positions < sink) | (positions >= length - window)]
        for i in range(gamma):
            expected = attend(q[t, i, b, 0], np.concatenate([kept, drafted[t, 1 : i + 1, :, b, 0]]))
            worst = max(worst, float(np.abs(got[t, i, b, 0] - expected).max()))
    return worst


@pytest.mark.parametrize(("window", "sink", "gamma"), SHAPES)
def test_the_ring_is_a_full_cache_with_the_same_window(window, sink, gamma):
    """From prompts that end just before, on and just past the length at which the window lets go of a key."""
    starts = tuple(max(1, window + sink + d) for d in (-2, -1, 0))
    assert worst_error(window, sink, gamma, gamma - 1, starts) < 1e-5
    assert worst_error(window, sink, gamma, gamma - 1, (1, 2, 3 * (window + sink) + 5)) < 1e-5


@pytest.mark.parametrize(("window", "sink", "gamma"), [shape for shape in SHAPES if shape[2] > 1])
def test_one_spare_slot_fewer_and_drafts_read_stale_keys(window, sink, gamma):
    """The drafted entries of a step reach gamma - 1 past the committed length, and the window may not give way."""
    starts = (1, window + sink, 3 * (window + sink))
    assert worst_error(window, sink, gamma, gamma - 2, starts) > 0.1
