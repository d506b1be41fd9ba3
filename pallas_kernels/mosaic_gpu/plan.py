"""What is fixed about a split-attention kernel before it runs, and the shared memory it takes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.errors import UnsupportedKernel

ROWS = 64
"""Query rows a tile: one warpgroup's ``wgmma`` takes exactly so many."""

KEYS = 64
"""Keys a tile."""

MULTIPROCESSORS = 132
"""Of an H100 or H200 SXM; others only share the work a little less evenly."""

_SHARED_MEMORY = 227 * 1024
_SPARE = 1024
_HEAD_DIMS = (64, 128, 256)
_EIGHT_BITS = (jnp.int8, jnp.float8_e4m3fn)


class Plan(NamedTuple):
    """Static choices of one kernel."""

    rows: int
    kv_heads: int
    head_dim: int
    slots: int
    query_tiles: int
    splits: int
    query_dtype: Any
    key_dtype: Any
    stages: int
    listed: bool
    sink: int

    @property
    def query_parts(self) -> int:
        """float32 queries and weights go through the bfloat16 tensor cores as sums of three."""
        return 3 if self.query_dtype == jnp.float32 else 1

    @property
    def key_parts(self) -> int:
        return 3 if self.key_dtype == jnp.float32 else 1

    @property
    def scaled(self) -> bool:
        return self.key_dtype in _EIGHT_BITS

    @property
    def aligned(self) -> bool:
        """TMA cuts an array into swizzled tiles of eight rows only where eight rows divide it."""
        return self.slots % 8 == 0

    @property
    def direct(self) -> bool:
        """Keys as they arrive are what the tensor cores read; else they pass through registers once more."""
        return self.aligned and self.key_dtype == jnp.bfloat16

    def shared_bytes(self, stages: int) -> int:
        tile = KEYS * self.head_dim
        raw = 2 * stages * (tile * jnp.dtype(self.key_dtype).itemsize + 4 * KEYS * (self.scaled + self.listed))
        staged = 0 if self.direct else 2 * self.key_parts * tile
        return raw + staged + 2 * self.query_parts * ROWS * (self.head_dim + KEYS) + _SPARE


def make_plan(op: str, q, k, splits: int | None, query_tiles: int, most_blocks: int, listed: bool, sink: int) -> Plan:
    """The plan for grouped queries [B K Q D] over keys [R K P D].

    Raises ValueError where a shape or a type cannot run, and says what to do.
    """
    _check(op, q, k)
    rows, kv_heads, _, head_dim = q.shape
    plan = Plan(rows, kv_heads, head_dim, k.shape[2], query_tiles, 1, q.dtype, k.dtype, 1, listed, sink)
    stages = next((n for n in (2, 1) if plan.shared_bytes(n) <= _SHARED_MEMORY), None)
    if stages is None:
        raise UnsupportedKernel(
            f"{op}: head_dim={head_dim} in {k.dtype} needs {plan.shared_bytes(1) // 1024} KB of shared memory and a "
            "multiprocessor has 227; take bfloat16 keys or implementation='xla'"
        )
    plan = plan._replace(stages=stages)
    resident = MULTIPROCESSORS * min(2, _SHARED_MEMORY // plan.shared_bytes(stages))
    chosen = splits or _even_splits(rows * kv_heads * query_tiles, resident)
    return plan._replace(splits=max(1, min(chosen, most_blocks)))


def _even_splits(tasks: int, resident: int) -> int:
    """Splits that fill whole waves of blocks; a small batch gets one wave and a large one up to four shares a task."""
    first = max(1, resident // tasks)

    def filled(splits):
        waves = -(-tasks * splits // resident)
        return tasks * splits / (waves * resident)

    return max(range(first, first + 4), key=lambda splits: (filled(splits) >= 0.9, filled(splits) - 1e-3 * splits))


def _check(op, q, k):
    if q.shape[-1] not in _HEAD_DIMS:
        raise UnsupportedKernel(
            f"{op}: mosaic_gpu takes a head_dim of 64, 128 or 256 and got {q.shape[-1]}; take 'xla'"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise UnsupportedKernel(f"{op}: mosaic_gpu takes bfloat16 or float32 queries and got {q.dtype}")
    if k.dtype != q.dtype and k.dtype not in _EIGHT_BITS:
        raise UnsupportedKernel(f"{op}: queries are {q.dtype} and keys {k.dtype}; keys must match or have eight bits")


def tiled(dtype) -> tuple:
    """The layout of a tile that both TMA and ``wgmma`` know: 64 columns of at most 16 bits, or 32 of 32, swizzled."""
    swizzle = min(128, KEYS * jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)
