"""A Hugging Face folder whose quantized weights read as float32, under the names and shapes of unquantized ones."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np

from checkpoints_convert.quantization_config import read_quantization
from checkpoints_convert.quantized import (
    ACTIVATION_SCALES,
    BYTES,
    FP8,
    Quantized,
    Scale,
    companions,
    describe,
    stem,
    weight_name,
)
from checkpoints_convert.tensor_files import DTYPES, TensorFolder, read_json
from checkpoints_convert.tokenizer_files import copy_companions, eos_ids

# Looking codes up turns them into eight-byte indices, so many at a time.
_CHUNK = 2**18
_BYTE = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTE.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E2M1 = _BYTE[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
# The two values of a byte side by side as one entry of eight bytes; the low half of the byte comes first.
_E2M1_PAIRS = np.stack([_E2M1[_BYTE & 15], _E2M1[_BYTE >> 4]], axis=-1).view(np.uint64)[:, 0]


class WeightFolder(TensorFolder):
    """A ``TensorFolder`` that decodes quantized weights as they are read.

    In ``tensors`` a quantized weight has the name that tables use, the shape of its values and its format for a dtype;
    the tensors that belong to it are in ``companions`` instead, with its name. Of one that cannot be decoded,
    ``quantized`` says why.
    """

    format: ClassVar[str] = "huggingface"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.config = read_json(folder / "config.json")
        config = read_quantization(self.config)
        stored = self._stored = dict(self.tensors)
        self.quantized: dict[str, Quantized] = {}
        self.companions: dict[str, str] = {}
        # By weight, what is wrong with each damaged scale that was read.
        self.damaged_scales: dict[str, dict[str, str]] = {}
        codes = {weight_name(name, stored): name for name, info in stored.items() if info.dtype not in DTYPES}
        scales = {scale for weight in codes for scale in companions(weight, stored)}
        for weight, code_name in codes.items():
            if code_name not in scales:
                self._add(weight, describe(weight, code_name, stored, config))

    def _add(self, weight: str, quantized: Quantized) -> None:
        info = self._stored[quantized.code_name]
        used = {scale.name for scale in quantized.scales} | {stem(weight) + suffix for suffix in ACTIVATION_SCALES}
        # A fault can leave open which scales are meant: all go with the weight then, so that one line tells it.
        own = [name for name in companions(weight, self._stored) if quantized.faults or name in used]
        self.quantized[weight] = quantized
        self.companions |= dict.fromkeys(own, weight)
        for name in (quantized.code_name, *own):
            del self.tensors[name]
        self.tensors[weight] = dataclasses.replace(info, shape=quantized.shape, dtype=quantized.format)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` along the first axis: float32 of a quantized weight, else in the stored dtype."""
        quantized = self.quantized.get(name)
        if quantized is None:
            return super().read(name, start, stop)
        stop = quantized.shape[0] if stop is None else stop
        info = self._stored[quantized.code_name]
        codes = self._read_rows(quantized.code_name, info, start, stop)
        values = _look_up(_E2M1_PAIRS, codes).view(np.float32) if info.dtype == BYTES else _look_up(_E4M3, codes)
        first, *others = quantized.scales
        # Damaged scales are told apart from damaged weights in ``damaged_scales``, and overflow is found in the result.
        with np.errstate(all="ignore"):
            factors = self._factors(name, first, start, stop)
            for scale in others:
                factor = self._factors(name, scale, start, stop)
                factors = factors / factor if scale.divides else factors * factor
            return _multiply_blocks(values, factors, first.block[-1])

    def eos_ids(self) -> tuple[int, ...]:
        """The ids in generation_config.json and that of the tokenizer's eos_token."""
        return eos_ids(self.path)

    def write_companions(self, out: Path) -> list[str]:
        """Copies every file that goes with the weights; returns warnings about what is absent."""
        return copy_companions(self.path, out)

    def _factors(self, weight: str, scale: Scale, start: int, stop: int) -> np.ndarray:
        """The scale's factors for rows ``start`` to ``stop``, still one for each block of columns.

        Axes along which the grid has a single factor keep length one.
        """
        info = self._stored[scale.name]
        shared = scale.grid[0] == 1
        first, last = (0, None) if shared else (start // scale.block[0], -(-stop // scale.block[0]))
        factors = self._read_rows(scale.name, info, first, last)
        factors = _look_up(_E4M3, factors) if info.dtype == FP8 else factors.astype(np.float32)
        if not np.isfinite(factors).all():
            self.damaged_scales.setdefault(weight, {})[scale.name] = "holds NaN or infinite values"
        elif scale.divides and not factors.all():
            self.damaged_scales.setdefault(weight, {})[scale.name] = "holds a zero, by which it would divide"
        factors = factors.reshape(-1, *scale.grid[1:])
        spans = [range(start, stop), *map(range, self.quantized[weight].shape[1:-1])]
        for axis, (span, block) in enumerate(zip(spans, scale.block, strict=False)):
            if scale.grid[axis] > 1 and block > 1:
                factors = np.take(factors, np.arange(span.start, span.stop) // block - span.start // block, axis)
        return factors


def _look_up(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    out = np.empty(codes.shape, table.dtype)
    into, flat = out.reshape(-1), codes.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        into[start : start + _CHUNK] = table[flat[start : start + _CHUNK]]
    return out


def _multiply_blocks(values: np.ndarray, factors: np.ndarray, block: int) -> np.ndarray:
    """Multiplies each run of ``block`` columns by its factor; the last run may be shorter."""
    columns = values.shape[-1]
    if missing := -columns % block:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    runs = values.reshape(*values.shape[:-1], -1, block)
    runs *= factors[..., None]
    return runs.reshape(values.shape)[..., :columns]
