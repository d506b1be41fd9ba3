"""What this machine can do at best, measured in the same run as what is compared with it."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from wmtp_jax.bench.timing import seconds_of
from wmtp_jax.errors import UserError
from wmtp_jax.units import show_bytes

# Far past any cache, and a matrix large enough that its rate has levelled off.
_READ_BYTES = {"cpu": 2**29, "gpu": 2**32, "tpu": 2**31}
_MATRIX = {"cpu": 2048, "gpu": 8192, "tpu": 8192}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``read_bandwidth`` in bytes a second; ``matrix_flops`` a second, of square products in the weights' dtype."""

    device: str
    read_bandwidth: float
    matrix_flops: float


def measure_machine(dtype: DTypeLike, repeats: int = 5) -> Machine:
    """The median rates of summing a large array and of multiplying large square matrices."""
    backend = jax.default_backend()
    numbers = jnp.ones(_READ_BYTES.get(backend, 2**29) // 4, jnp.float32)
    read = seconds_of(jax.jit(jnp.sum), numbers, repeats=repeats)
    bandwidth = numbers.nbytes / read
    numbers.delete()
    size = _MATRIX.get(backend, 2048)
    matrix = jnp.full((size, size), 0.5, dtype)
    product = seconds_of(jax.jit(lambda a: a @ a), matrix, repeats=repeats)
    return Machine(device=jax.devices()[0].device_kind, read_bandwidth=bandwidth, matrix_flops=2.0 * size**3 / product)


def free_bytes() -> int | None:
    """Memory that the first device has left, or None where it does not say."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    for line in _memory_lines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def require_free(needed: int, what: str) -> None:
    """Raises UserError where the memory that is left cannot hold so many bytes."""
    free = free_bytes()
    if free is not None and needed > free:
        raise UserError(f"{what}: {show_bytes(needed)} are needed and {show_bytes(free)} of memory are free")


def _memory_lines() -> list[str]:
    # Linux alone has the file; elsewhere nothing is known.
    path = Path("/proc/meminfo")
    return path.read_text().splitlines() if path.exists() else []
