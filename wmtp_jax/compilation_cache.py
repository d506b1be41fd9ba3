"""JAX's persistent compilation cache in the user's cache folder: a second run loads its programs, not compiles them."""

import hashlib
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

SIZE_LIMIT_BYTES = 2 * 1024**3
"""When the programs take more than this, the oldest go until half of it is free."""


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Makes JAX keep every program it compiles in a folder and look there first; call it before the first compilation.

    The folder is, in this order: the argument, the one that JAX is set to already (`JAX_COMPILATION_CACHE_DIR`), or
    one for this kind of processor below `user_cache_folder()`. Returns it. One that cannot be written, or a cache
    that is switched off (`JAX_ENABLE_COMPILATION_CACHE=0`), gives None; the former with a line on standard error.
    """
    if not _setting("jax_enable_compilation_cache"):
        return None
    chosen = folder or _setting("jax_compilation_cache_dir")
    path = Path(chosen) if chosen else user_cache_folder() / "programs" / _processor()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        print(f"wmtp: programs are not kept for the next run: {path}: {error.strerror}", file=sys.stderr)
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    if not chosen:
        _trim(path, SIZE_LIMIT_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(path))
    # JAX's own thresholds would leave out the many small programs, which together take longer to compile than the loop.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def user_cache_folder() -> Path:
    """Where this platform wants a program's cache, for `wmtp`: `XDG_CACHE_HOME`, where set, decides on any platform."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "wmtp"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "wmtp"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "wmtp" / "cache"
    return Path.home() / ".cache" / "wmtp"


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _processor() -> str:
    """Names the processor's kind: a program compiled for one may not run on another that shares the home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    kind = [line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "CPU part", "Features"))]
    digest = hashlib.sha256("\n".join([*kind, platform.processor()]).encode()).hexdigest()
    return f"{platform.machine() or 'unknown'}-{digest[:12]}"


def _trim(folder: Path, limit_bytes: int) -> None:
    """Deletes the files written longest ago, once all together exceed the limit, until half of it is free."""
    files = []
    for path in folder.iterdir():
        try:
            status = path.stat()
        except OSError:
            continue
        files.append((status.st_mtime, status.st_size, path))
    excess = sum(size for _, size, _ in files) - limit_bytes
    if excess <= 0:
        return
    excess += limit_bytes // 2
    for _, size, path in sorted(files):
        if excess <= 0:
            return
        path.unlink(missing_ok=True)
        excess -= size
