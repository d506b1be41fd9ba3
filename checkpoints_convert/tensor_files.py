"""Reads safetensors folders row by row, without mapping files into memory.

The safetensors library validates each header.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints_convert.raw_files import RawFiles
from wmtp_jax.errors import UserError

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Read as they are, to be decoded.
CODES: dict[str, np.dtype] = {"U8": np.dtype(np.uint8), "F8_E4M3": np.dtype(np.uint8)}
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one stored tensor lies: ``dtype`` in the file's spelling, ``offset`` in bytes from its start."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class TensorFolder:
    """Every tensor of a Hugging Face folder by name. Headers are read at once, values only on ``read``.

    Use as a context manager, so that files are closed. Raises UserError for a folder, index or file that is damaged.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self.tensors: dict[str, TensorInfo] = {}
        self._files = RawFiles()
        for path, expected in _shards(folder).items():
            found = _read_header(path)
            _check_shard(path, found, expected)
            self.tensors.update(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` along the first axis, in the stored dtype (one of ``DTYPES``)."""
        return self._read_rows(name, self.tensors[name], start, stop)

    def _read_rows(self, name: str, info: TensorInfo, start: int, stop: int | None) -> np.ndarray:
        dtype = DTYPES.get(info.dtype) or CODES[info.dtype]
        if not info.shape:
            start, stop, shape = 0, 1, ()
        else:
            stop = info.shape[0] if stop is None else stop
            shape = (stop - start, *info.shape[1:])
        row_bytes = math.prod(info.shape[1:]) * dtype.itemsize
        out = np.empty(shape, dtype)
        self._files.read_into(info.path, info.offset + start * row_bytes, out, name)
        return out


def _shards(folder: Path) -> dict[Path, set[str] | None]:
    """The files to read, and the tensors that the index promises in each (None without an index)."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_shards(index)
    single = folder / SINGLE_NAME
    if single.is_file():
        return {single: None}
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return {others[0]: None}
    if others:
        raise UserError(f"{folder}: several .safetensors files but no {INDEX_NAME}; download the folder again")
    raise UserError(f"{folder}: holds no {SINGLE_NAME} and no {INDEX_NAME}; is it a Hugging Face model folder?")


def _indexed_shards(index: Path) -> dict[Path, set[str] | None]:
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise UserError(f"{index}: has no weight_map; download the file again")
    shards: dict[Path, set[str]] = {}
    for name, file in entries.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index}: weight_map[{name!r}] is {file!r}, not the name of a file in this folder")
        shards.setdefault(index.parent / file, set()).add(name)
    missing = sorted(path.name for path in shards if not path.is_file())
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UserError(f"{index.parent}: missing {len(missing)} of {len(shards)} shards: {shown}; download them again")
    return dict(sorted(shards.items()))


def _check_shard(path: Path, found: dict[str, TensorInfo], expected: set[str] | None) -> None:
    if expected is None:
        return
    absent, extra = sorted(expected - found.keys()), sorted(found.keys() - expected)
    if absent:
        raise UserError(f"{path}: {INDEX_NAME} promises tensor {absent[0]}, which the file does not hold")
    if extra:
        raise UserError(f"{path}: holds tensor {extra[0]}, which {INDEX_NAME} does not list; one of them is stale")


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError, struct.error, RecursionError) as error:
        raise UserError(f"{path}: not a complete safetensors file ({error}); download it again") from None
    entries.pop("__metadata__", None)
    return {name: _tensor_info(path, 8 + size, entry) for name, entry in entries.items()}


def _tensor_info(path: Path, data_start: int, entry: dict[str, Any]) -> TensorInfo:
    offset = data_start + entry["data_offsets"][0]
    return TensorInfo(path=path, dtype=entry["dtype"], shape=tuple(entry["shape"]), offset=offset)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises UserError naming the file where it is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {path.parent} a Hugging Face model folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
