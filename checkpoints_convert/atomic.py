"""Folders that appear whole or not at all, whatever happens while they are made."""

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wmtp_jax.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_MESSAGES = tuple(os.strerror(code) for code in _FULL)


@contextmanager
def atomic_folder(out: Path, *, force: bool, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields a temporary sibling of ``out`` that becomes ``out`` at the end, synced to disk.

    An error removes it; a killed process leaves it, and the next run removes it. With ``force`` an existing folder
    stays whole until the new one is complete. Raises UserError for a folder in the way and for a full disk.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; choose another folder")
    _make_parent(out)
    _clean_stale(out)
    _require_absent(out, force)
    _require_space(out, needed_bytes)
    building = _sibling(out, "building")
    try:
        with full_disk_is_a_user_error(out):
            yield building
            _sync(building)
        _require_absent(out, force)
        _swap(building, out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def full_disk_is_a_user_error(out: Path) -> Iterator[None]:
    """Turns a full disk, as the system or as Orbax words it, into one clear line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in _FULL
        if full or any(message in str(error) for message in _FULL_MESSAGES):
            raise UserError(f"{out}: the disk is full (or a size limit is reached); nothing was written") from None
        raise


def _require_absent(out: Path, force: bool) -> None:
    if out.exists() and not force:
        raise UserError(f"{out}: exists already; choose another folder or pass --force to replace it")


def _make_parent(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out.parent}: cannot be made ({error.strerror})") from None


def _require_space(out: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(out.parent).free
    if free < needed_bytes:
        raise UserError(f"{out}: needs {needed_bytes / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free")


def _sibling(out: Path, role: str) -> Path:
    try:
        made = Path(tempfile.mkdtemp(prefix=f"{_prefix(out, role)}{os.getpid()}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"{out.parent}: cannot be written to ({error.strerror})") from None
    umask = os.umask(0)
    os.umask(umask)
    made.chmod(0o777 & ~umask)
    return made


def _prefix(out: Path, role: str) -> str:
    return f".{out.name}.{role}.{socket.gethostname()}."


def _clean_stale(out: Path) -> None:
    """Removes what processes that no longer run left behind; a replaced folder whose swap was cut short comes back."""
    for path in _stale(out, "replaced"):
        if out.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            (path / out.name).rename(out)
            path.rmdir()
    for path in _stale(out, "building"):
        shutil.rmtree(path, ignore_errors=True)


def _stale(out: Path, role: str) -> list[Path]:
    prefix = _prefix(out, role)
    names = [name for name in os.listdir(out.parent) if name.startswith(prefix)]
    return [out.parent / name for name in names if not _is_running(name.removeprefix(prefix).split(".")[0])]


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError, OverflowError):
        return True
    return True


def _swap(building: Path, out: Path) -> None:
    if out.exists():
        aside = _sibling(out, "replaced")
        out.rename(aside / out.name)
        building.rename(out)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        building.rename(out)
    _sync_one(out.parent)


def _sync(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync_one(Path(root) / name)
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
