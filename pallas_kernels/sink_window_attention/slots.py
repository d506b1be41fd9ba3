"""Which slot of the ring holds which position."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def ring_slot(positions: Int[Array, "*S"], sink: int, capacity: int) -> Int[Array, "*S"]:
    """The slot of each position."""
    return jnp.where(positions < sink, positions, sink + (positions - sink) % (capacity - sink))


def ring_positions(last: Int[Array, " B"], sink: int, capacity: int) -> Int[Array, "B C"]:
    """The newest position up to ``last`` that each slot can hold; negative or past ``last`` where there is none."""
    slots = jnp.arange(capacity)
    newest = last[:, None] - (last[:, None] - slots) % (capacity - sink)
    # A ring slot that the row has not reached yet would hold a position below the sink: mark it empty.
    return jnp.where(slots < sink, slots, jnp.where(newest < sink, -1, newest))
