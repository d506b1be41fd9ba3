"""How tests compile: quickly, but where the compiled program itself is looked at. Loads no JAX."""

from importlib import metadata

# Later ones do not know this flag, and end the process at one that they do not know.
_HAS_OLD_EMITTERS = metadata.version("jaxlib").startswith("0.10.")

# Most of a cold run's time is compiling, and with these it takes a quarter to a half. Numbers change by rounding alone.
QUICKLY = "--xla_backend_optimization_level=0" + (" --xla_cpu_use_fusion_emitters=false" if _HAS_OLD_EMITTERS else "")

# Options of one program that undo them: what users get.
AS_INSTALLED: dict[str, bool | int | str] = {"xla_backend_optimization_level": 3}
if _HAS_OLD_EMITTERS:
    AS_INSTALLED["xla_cpu_use_fusion_emitters"] = True
