"""How every op picks its implementation: ``None`` always works, a name that cannot run raises and says why."""

import importlib
from collections.abc import Callable, Collection

import jax

from pallas_kernels.errors import UnsupportedKernel

# Interpreted and lowered everywhere, but not yet checked on a device: there, None stays with the portable form.
_DEFAULT = "xla"
IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu", "mosaic_tpu")
_BACKENDS = {"mosaic_gpu": "gpu", "mosaic_tpu": "tpu"}
# Hopper: wgmma and TMA.
_LEAST_CAPABILITY = {"mosaic_gpu": (9, 0)}


def choose(op: str, implementations: Collection[str], implementation: str | None) -> Callable:
    """The function ``op`` of ``pallas_kernels.<op>.<implementation>``; the module is imported when it is first used.

    Raises UnsupportedKernel for an unknown name and for one that needs another machine.
    """
    name = implementation or _DEFAULT
    if name not in implementations:
        raise UnsupportedKernel(
            f"{op}: implementation={name!r} does not exist; choose one of {sorted(implementations)} or None"
        )
    needed, here = _BACKENDS.get(name), jax.default_backend()
    if needed and here != needed:
        raise UnsupportedKernel(
            f"{op}: implementation={name!r} needs a {needed.upper()} and JAX found a {here.upper()}; take None"
        )
    if name in _LEAST_CAPABILITY:
        refuse_older(op, name, getattr(jax.devices()[0], "compute_capability", ""))
    return getattr(importlib.import_module(f"pallas_kernels.{op}.{name}"), op)


def require_kernels(implementation: str | None) -> None:
    """Raises UnsupportedKernel where no operation could run under this name here."""
    choose("gated_delta_rule", IMPLEMENTATIONS, implementation)


def refuse_older(op: str, name: str, capability: str) -> None:
    """Raises UnsupportedKernel when a GPU of this compute capability, "8.6" for example, cannot run ``name``."""
    needed = _LEAST_CAPABILITY[name]
    if capability and tuple(int(part) for part in capability.split(".")) < needed:
        raise UnsupportedKernel(
            f"{op}: implementation={name!r} needs a GPU of compute capability {'.'.join(map(str, needed))} or later "
            f"and this one has {capability}; take None"
        )
