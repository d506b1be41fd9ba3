"""Attention over a ring that keeps an attention sink and a sliding window: the draft's attention.

Position p of a row lies in slot p for p < sink, else in slot sink + (p - sink) mod (capacity - sink)
(StreamingLLM's kept set, arXiv 2309.17453, without its re-indexing: keys keep their absolute positions).
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import choose
from pallas_kernels.sink_window_attention.slots import ring_positions, ring_slot


def sink_window_attention(
    q: Float[Array, "B T H D"],
    k_ring: Float[Array, "B K C D"],
    v_ring: Float[Array, "B K C D"],
    positions: Int[Array, "B T"],
    window_start: Int[Array, "B T"],
    sink: int,
    *,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Query (b, t) attends to positions p <= positions[b, t] with p < sink or p >= window_start[b, t].

    The ring must hold every such position, up to the largest of ``positions[b]``, and queries may reach back at most
    C - sink positions from there. A full cache is the ring with ``sink=0``, ``window_start=0`` and C positions.
    Float32 scores and sums, scaled by D^-1/2. Work follows the longest filled part of the rings.
    """
    return choose("sink_window_attention", implementation)(q, k_ring, v_ring, positions, window_start, sink)


__all__ = ["ring_positions", "ring_slot", "sink_window_attention"]
