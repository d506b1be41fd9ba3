"""Reads the header of a GGUF file: its metadata, and where its tensors lie.

The gguf library's own reader maps the file and keeps an array object for every string: half a minute and 160 MB for a
vocabulary of 49,000 tokens. This one reads the same bytes in order, and says what is wrong where they end or make no
sense.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from checkpoints_convert.tensor_files import TensorInfo
from wmtp_jax.errors import UserError

_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MAX_AXES = 4
_NUMBERS: dict[int, np.dtype] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True, kw_only=True)
class Header:
    """Metadata by key, and every tensor by its name in the file; shapes have the slowest axis first."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Raises UserError for anything but a whole little-endian GGUF file of one part."""
    try:
        with path.open("rb") as file:
            return _read(path, _Cursor(path, file, path.stat().st_size))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def type_name(number: int) -> str:
    """How a tensor type is spelled; one that the library does not know has a number only."""
    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}"


def block_of(dtype: str) -> tuple[int, int] | None:
    """How many values a block of a tensor type holds, and in how many bytes; None for an unknown type."""
    known = GGMLQuantizationType.__members__.get(dtype)
    return None if known is None else GGML_QUANT_SIZES[known]


class _Cursor:
    """Reads a file from its start to its end, never past it."""

    def __init__(self, path: Path, file: BinaryIO, size: int):
        self.path, self.size, self.at = path, size, 0
        self._file = file

    def take(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self.size - self.at else b""
        if len(data) < count:
            raise UserError(f"{self.path}: ends inside its header at byte {self.size}; download it again")
        self.at += count
        return data

    def number(self, form: str) -> int:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        start = self.at
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: the text at byte {start} is not UTF-8; download it again") from None

    def value(self, kind: int) -> Any:
        """One metadata value."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self._numbers(kind, 1)[0]

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == GGUFValueType.STRING:
            texts = []
            # Not a comprehension over a count that may be absurd: the file ends first.
            while len(texts) < count:
                texts.append(self.text())
            return texts
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            raise UserError(f"{self.path}: metadata of unknown type {kind} at byte {self.at}; download it again")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def _read(path: Path, cursor: _Cursor) -> Header:
    _check_start(path, cursor)
    count, keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    while keys:
        keys -= 1
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    _check_parts(path, metadata)
    tensors: dict[str, TensorInfo] = {}
    while count:
        count -= 1
        name = cursor.text()
        if name in tensors:
            raise UserError(f"{path}: holds tensor {name} twice; download it again")
        tensors[name] = _tensor(path, name, cursor)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
        raise UserError(f"{path}: general.alignment={alignment!r} must be a positive whole number")
    start = -(-cursor.at // alignment) * alignment
    placed = {name: _placed(name, info, start, cursor.size) for name, info in tensors.items()}
    return Header(metadata=metadata, tensors=placed)


def _check_start(path: Path, cursor: _Cursor) -> None:
    if cursor.size < 4 or cursor.take(4) != b"GGUF":
        raise UserError(f"{path}: is not a GGUF file (it does not begin with GGUF); download it again")
    version = cursor.number("I")
    if version and not version & 0xFFFF:
        raise UserError(f"{path}: is big-endian; get the little-endian file, or swap it with gguf-convert-endian")
    if version not in _VERSIONS:
        raise UserError(f"{path}: is GGUF version {version}, and only {' and '.join(map(str, _VERSIONS))} are read")


def _check_parts(path: Path, metadata: dict[str, Any]) -> None:
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UserError(f"{path}: is one of {parts} parts; merge all of them with `llama-gguf-split --merge` first")


def _tensor(path: Path, name: str, cursor: _Cursor) -> TensorInfo:
    """What the header says of a tensor; its offset still counts from the start of the data."""
    axes = cursor.number("I")
    if axes > _MAX_AXES:
        raise UserError(f"{path}: tensor {name} has {axes} axes, more than {_MAX_AXES}; download it again")
    shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
    dtype = type_name(cursor.number("I"))
    return TensorInfo(path=path, dtype=dtype, shape=shape, offset=cursor.number("Q"))


def _placed(name: str, info: TensorInfo, start: int, size: int) -> TensorInfo:
    placed = TensorInfo(path=info.path, dtype=info.dtype, shape=info.shape, offset=start + info.offset)
    block = block_of(info.dtype)
    if block is None:
        return placed
    values, block_bytes = block
    end = placed.offset + math.prod(info.shape) // values * block_bytes
    if end > size:
        raise UserError(
            f"{info.path}: ends at byte {size}, within the tensors: {name} ends at byte {end}; download it again"
        )
    return placed
