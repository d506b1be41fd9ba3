"""What every test stands on: the CPU unless the caller says otherwise, true float32 products, reproducible examples."""

import os
from pathlib import Path

from tests.compiling import QUICKLY

# These must be set before anything imports JAX; processes that tests start inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", QUICKLY)
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker is one core's worth of work: torch would start a thread a core in every one of them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "dev",
    deadline=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

_MAPS = Path("/proc/self/maps")
# Linux gives a process 65530 mappings by default; one text generated with a new gamma takes about a thousand.
_MOST_MAPS = 30000


def pytest_runtest_teardown() -> None:
    """Lets compiled programs go before LLVM runs out of mappings, which ends the process."""
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MOST_MAPS:
        import jax

        jax.clear_caches()
