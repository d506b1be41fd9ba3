"""The draft head's keys and values: a ring of sink + window + spare slots a row, constant in the context length.

A step at committed length L reads back to position L - window and drafts entries up to L + gamma - 2, so gamma - 1
spare slots beyond the window are exactly enough: with one fewer, a drafted entry overwrites a key that is still read.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.bit_patterns import as_bits, as_floats, float_dtype
from pallas_kernels.sink_window_attention import ring_slot, sink_window_attention
from wmtp_jax.cache.ring_shape import RingShape


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftRing:
    """A native (unwindowed) cache is the ring without a sink whose window is the whole capacity: it never wraps.

    The dtype is that of ``bit_patterns.as_bits``.
    """

    keys: Float[Array, "B K C D"]
    values: Float[Array, "B K C D"]
    sink: int = field(metadata={"static": True})
    window: int = field(metadata={"static": True})
    kernels: str | None = field(default=None, metadata={"static": True})

    def write(
        self,
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
    ) -> "DraftRing":
        """Stores entries; valid positions of one call must lie in different slots."""
        capacity = self.keys.shape[2]
        slot = jnp.where(valid, ring_slot(positions, self.sink, capacity), capacity)
        rows, heads = jnp.arange(slot.shape[0]), jnp.arange(self.keys.shape[1])
        at = (rows[:, None, None], heads, slot[..., None])
        k, v = (as_bits(x.astype(float_dtype(self.keys))) for x in (k, v))
        keys, values = self.keys.at[at].set(k, mode="drop"), self.values.at[at].set(v, mode="drop")
        return replace(self, keys=keys, values=values)

    def attend(
        self, q: Float[Array, "B T H D"], positions: Int[Array, "B T"], committed: Int[Array, " B"]
    ) -> Float[Array, "B T H D"]:
        """Attends to the sink, the last ``window`` of the ``committed`` entries, and drafted entries up to itself."""
        start = jnp.broadcast_to((committed - self.window)[:, None], positions.shape)
        return sink_window_attention(
            q,
            as_floats(self.keys),
            as_floats(self.values),
            positions,
            start,
            self.sink,
            implementation=self.kernels,
        )

    def is_read(self, positions: Int[Array, "B T"], committed: Int[Array, " B"]) -> Bool[Array, "B T"]:
        """Whether a draft at ``committed`` length would read these positions."""
        return (positions < self.sink) | (positions >= (committed - self.window)[:, None])


def allocate_ring(
    rows: int, kv_heads: int, head_dim: int, shape: RingShape, dtype: DTypeLike, kernels: str | None = None
) -> DraftRing:
    """An empty ring."""
    keys, values = (as_bits(jnp.zeros((rows, kv_heads, shape.slots, head_dim), dtype)) for _ in range(2))
    return DraftRing(keys, values, shape.sink, shape.window, kernels)
