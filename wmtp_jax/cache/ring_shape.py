"""How large a draft ring is. Apart from the ring, so that planning reads it without JAX."""

from typing import NamedTuple


class RingShape(NamedTuple):
    """``sink`` + ``window`` + ``spare`` slots a row."""

    window: int
    sink: int
    spare: int

    @property
    def slots(self) -> int:
        return self.sink + self.window + self.spare


def ring_shape(window: int, sink: int, gamma: int, capacity: int) -> RingShape:
    """The ring for rows of up to ``capacity`` positions; one that sees them all, as a native draft, never wraps."""
    if not window or window + sink >= capacity:
        return RingShape(window=capacity, sink=0, spare=0)
    return RingShape(window=window, sink=sink, spare=max(gamma - 1, 0))
