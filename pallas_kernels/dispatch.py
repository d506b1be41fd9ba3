"""How every op picks its implementation: ``None`` always works, a name that cannot run raises and says why."""

import importlib
from collections.abc import Callable

import jax

from pallas_kernels.errors import UnsupportedKernel

IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu", "mosaic_tpu")
# The others have been interpreted and lowered but not run on a device: until then None means this one everywhere.
_DEFAULT = "xla"
_BACKENDS = {"mosaic_gpu": "gpu", "mosaic_tpu": "tpu"}
# wgmma exists on Hopper alone.
_CAPABILITIES = {"mosaic_gpu": "9.0"}


def choose(op: str, implementation: str | None) -> Callable:
    """The function ``op`` of ``pallas_kernels.<op>.<implementation>``; the module is imported when it is first used.

    Raises UnsupportedKernel as ``require_kernels`` does.
    """
    require_kernels(implementation)
    return getattr(importlib.import_module(f"pallas_kernels.{op}.{implementation or _DEFAULT}"), op)


def require_kernels(implementation: str | None) -> None:
    """Raises UnsupportedKernel for an unknown name and for one that needs another machine. Shapes are not looked at."""
    name = _DEFAULT if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise UnsupportedKernel(
            f"kernels {name!r} do not exist: take one of {', '.join(IMPLEMENTATIONS)}, or leave it out"
        )
    needed, here = _BACKENDS.get(name), jax.default_backend()
    if needed and here != needed:
        raise UnsupportedKernel(
            f"kernels {name!r} need a {needed.upper()} and JAX found a {here.upper()}: leave it out"
        )
    require_capability(name, getattr(jax.devices()[0], "compute_capability", ""))


def require_capability(name: str, capability: str) -> None:
    """Raises UnsupportedKernel where a GPU of this compute capability, "8.6" for example, cannot run ``name``."""
    needed = _CAPABILITIES.get(name, capability)
    if capability and capability != needed:
        raise UnsupportedKernel(
            f"kernels {name!r} need a GPU of compute capability {needed} (Hopper) and this one has {capability}: "
            "leave it out"
        )
