"""Machines: one chip's memory, its bandwidth and its dense bfloat16 matrix rate, as their makers state them."""

from dataclasses import dataclass
from typing import Literal

from wmtp_jax.option_checks import require_one_of


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One chip. ``matrix_flops`` is without sparsity, in the number format that the models here run in on it."""

    name: str
    kind: Literal["gpu", "tpu", "cpu"]
    memory_bytes: float
    bandwidth: float
    matrix_flops: float
    source: str

    @property
    def weights(self) -> str:
        """The format that weights have here unless another is asked for."""
        return "float32" if self.kind == "cpu" else "bf16"

    @property
    def cache(self) -> str:
        """The same for keys and values."""
        return self.weights


_TABLE = (
    Hardware(
        name="h200",
        kind="gpu",
        memory_bytes=141e9,
        bandwidth=4.8e12,
        matrix_flops=989e12,
        source="NVIDIA H200 data sheet, SXM (1,979 TFLOP/s bf16 with sparsity, half of it without)",
    ),
    Hardware(
        name="h100",
        kind="gpu",
        memory_bytes=80e9,
        bandwidth=3.35e12,
        matrix_flops=989e12,
        source="NVIDIA H100 data sheet, SXM (1,979 TFLOP/s bf16 with sparsity, half of it without)",
    ),
    Hardware(
        name="b200",
        kind="gpu",
        memory_bytes=180e9,
        bandwidth=7.7e12,
        matrix_flops=2.25e15,
        source="NVIDIA Blackwell data sheet, HGX B200 (4.5 PFLOP/s bf16 with sparsity, half of it without)",
    ),
    Hardware(
        name="tpu-v5e",
        kind="tpu",
        memory_bytes=16e9,
        bandwidth=819e9,
        matrix_flops=197e12,
        source="Google Cloud documentation, TPU v5e, one chip",
    ),
    Hardware(
        name="tpu-v6e",
        kind="tpu",
        memory_bytes=32e9,
        bandwidth=1638e9,
        matrix_flops=918e12,
        source="Google Cloud documentation, TPU v6e, one chip",
    ),
    Hardware(
        name="cpu",
        kind="cpu",
        memory_bytes=24 * 2**30,
        bandwidth=21e9,
        matrix_flops=215e9,
        source="measured, float32: 2 cores of an AMD EPYC (Zen 4) virtual machine with 24 GiB; see docs/planning.md",
    ),
)
HARDWARE = {hardware.name: hardware for hardware in _TABLE}


def find_hardware(name: str) -> Hardware:
    """A machine by name. Raises UserError that lists the names."""
    require_one_of("hardware", name, HARDWARE)
    return HARDWARE[name]
