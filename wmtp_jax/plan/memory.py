"""Bytes of weights and caches in each format, and how many rows fit in a memory."""

import math
from typing import NamedTuple

from wmtp_jax.cache.ring_shape import ring_shape
from wmtp_jax.plan.hardware import Hardware
from wmtp_jax.plan.sizes import ModelSizes, Weights

FLOAT32_BYTES = 4
BF16_BYTES = 2
# One float32 scale to a block of 128 x 128 weights, as in the published FP8 checkpoints.
FP8_BYTES = 1 + 4 / 128**2
# Four bits and one eight-bit scale to 16 weights.
NVFP4_BYTES = 0.5 + 1 / 16
WEIGHT_FORMATS = ("bf16", "fp8", "nvfp4", "float32")
# Bytes of a number, and of the scale that comes with each position and head of an eight-bit format.
CACHE_FORMATS = {
    "bf16": (BF16_BYTES, 0),
    "float16": (2, 0),
    "int8": (1, FLOAT32_BYTES),
    "fp8": (1, FLOAT32_BYTES),
    "float32": (4, 0),
}
# Positions a page, on an accelerator.
PAGE = 256
# Kept back for activations, compiled programs and fragmentation: what the published runs kept (a fraction of 0.85
# of the memory was for weights and caches).
RESERVE = 0.15


def parameter_bytes(sizes: ModelSizes, weights: str, *, draft: bool) -> Weights:
    """Bytes a parameter of each kind.

    ``fp8`` covers experts and projections. ``nvfp4`` covers the target's experts alone: in the published checkpoints
    everything else of the target, and all of the draft head, stays in bfloat16.
    """
    plain = FLOAT32_BYTES if weights == "float32" else BF16_BYTES
    experts = projections = recurrent = plain
    if weights == "fp8":
        experts = projections = recurrent = FP8_BYTES
    elif weights == "nvfp4" and not draft:
        experts, recurrent = NVFP4_BYTES, sizes.nvfp4_recurrent_bytes
    return Weights(plain, plain, experts, projections, recurrent, plain, FLOAT32_BYTES)


def weight_bytes(sizes: ModelSizes, weights: str, *, draft: bool) -> int:
    """Bytes of the target's weights or of the draft head's own."""
    counts = sizes.draft if draft else sizes.target
    return round(counts.dot(parameter_bytes(sizes, weights, draft=draft)))


def position_bytes(sizes: ModelSizes, cache: str) -> int:
    """Keys and values of one position in one attention layer, with their scales."""
    number, scale = CACHE_FORMATS[cache]
    return 2 * sizes.num_kv_heads * (sizes.head_dim * number + scale)


class RowBytes(NamedTuple):
    """What one row holds at a context: the target's pages and recurrent state, and either of two draft caches."""

    pages: int
    state: int
    draft_native: int
    draft_ring: int

    @property
    def native(self) -> int:
        return self.pages + self.state + self.draft_native

    @property
    def windowed(self) -> int:
        return self.pages + self.state + self.draft_ring


def draft_format(weights: str, cache: str) -> str:
    """The draft's keys and values: in the target's format, or where that has eight bits in the weights' own."""
    return cache if CACHE_FORMATS[cache][0] > 1 else "float32" if weights == "float32" else "bf16"


def row_bytes(
    sizes: ModelSizes, weights: str, cache: str, *, context: int, gamma: int, window: int, sink: int
) -> RowBytes:
    """Bytes of caches for just this context: whole pages, and the ring of ``ring_shape``.

    ``generate`` rounds a row up further, by at most a quarter, so that few sizes are compiled.
    """
    capacity = math.ceil(context / PAGE) * PAGE
    tail_bytes = FLOAT32_BYTES if weights == "float32" else BF16_BYTES
    entry = sizes.draft_layers * position_bytes(sizes, draft_format(weights, cache)) if gamma else 0
    return RowBytes(
        pages=sizes.attention_layers * capacity * position_bytes(sizes, cache),
        state=sizes.state_elements * FLOAT32_BYTES + sizes.tail_elements * tail_bytes,
        draft_native=capacity * entry,
        draft_ring=ring_shape(window, sink, gamma, capacity).slots * entry,
    )


def rows_that_fit(hardware: Hardware, weights: int, row: int) -> int:
    """Rows of ``row`` bytes beside the weights, with ``RESERVE`` of the memory kept back."""
    return max(0, int((hardware.memory_bytes * (1 - RESERVE) - weights) // row))
