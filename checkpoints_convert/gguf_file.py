"""A GGUF file whose tensors read under the names, shapes and row order of a Hugging Face folder."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import gguf
import numpy as np

from checkpoints_convert.families import find_family
from checkpoints_convert.gguf_config import Metadata, hf_config
from checkpoints_convert.gguf_header import read_header
from checkpoints_convert.gguf_tokenizer import write_tokenizer
from checkpoints_convert.quantized import Quantized
from checkpoints_convert.raw_files import RawFiles
from checkpoints_convert.tensor_files import DTYPES, TensorInfo
from wmtp_jax.errors import UserError

_STEMS = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_STEMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_FIRST_LAYER = "model.layers.0."
# Factors of the rotary frequencies, which the config tells; tables skip them by the name they get here.
_ROPE_FACTORS = "rope_freqs.weight"
_ROPE_NAME = "model.rotary_emb.inv_freq"
# Decoding works on so many values at a time.
_CHUNK = 2**20
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.")
_PAIRED = re.compile(r"self_attn\.[qk]_proj\.")


class GgufFile:
    """A ``WeightSource``. Raises UserError for a file that is damaged, or of a model that is not Llama-shaped."""

    format: ClassVar[str] = "gguf"

    def __init__(self, path: Path):
        self.path = path
        header = read_header(path)
        self._metadata = Metadata(path, header.metadata)
        self._files = RawFiles()
        self._paired = self._metadata.architecture == "llama"
        rename = _renaming(self._metadata.architecture)
        self.tensors: dict[str, TensorInfo] = {rename(name): info for name, info in header.tensors.items()}
        if len(self.tensors) < len(header.tensors):
            raise UserError(f"{path}: holds tensors under names of GGUF and of Hugging Face; convert it to GGUF again")
        self.quantized = {name: _quantized(name, t) for name, t in self.tensors.items() if t.dtype not in DTYPES}
        self.companions: dict[str, str] = {}
        self.damaged_scales: dict[str, dict[str, str]] = {}
        with self:
            self.config = self._config(header.tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` along the first axis: float32 of a quantized weight, else in the stored dtype."""
        info = self.tensors[name]
        stop = (info.shape or (1,))[0] if stop is None else stop
        if not (self._paired and _PAIRED.search(name)):
            return self._rows(name, info, start, stop)
        width = self.config["head_dim"]
        first, last = start // width, -(-stop // width)
        heads = self._rows(name, info, first * width, last * width)
        return _unpaired(heads, width)[start - first * width : stop - first * width]

    def eos_ids(self) -> tuple[int, ...]:
        """None beyond those in ``config``."""
        return ()

    def write_companions(self, out: Path) -> list[str]:
        """Writes config.json and the tokenizer's files; returns warnings about what the file does not hold."""
        (out / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")
        return write_tokenizer(self._metadata, out)

    def _config(self, stored: dict[str, TensorInfo]) -> dict[str, Any]:
        config = hf_config(self._metadata, stored.keys(), self._rope_factors() if _ROPE_NAME in self.tensors else None)
        try:
            find_family(config).parse_config(config)
        except UserError as error:
            reason = str(error).removeprefix("config.json: ")
            raise UserError(f"{self.path}: {reason} (its metadata in the words of config.json)") from None
        return config

    def _rope_factors(self) -> np.ndarray:
        info = self.tensors[_ROPE_NAME]
        if info.dtype != "F32" or len(info.shape) != 1:
            raise UserError(f"{self.path}: rope_freqs.weight is {info.dtype} {list(info.shape)}, not one row of F32")
        return self.read(_ROPE_NAME)

    def _rows(self, name: str, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Rows in the file's order. Of one axis, a quantized tensor is read whole: its blocks span its elements."""
        dtype = DTYPES.get(info.dtype)
        if dtype is not None:
            out = np.empty((stop - start, *info.shape[1:]) if info.shape else (), dtype)
            self._files.read_into(
                info.path, info.offset + start * math.prod(info.shape[1:]) * dtype.itemsize, out, name
            )
            return out
        if len(info.shape) == 1:
            whole = dataclasses.replace(info, shape=(1, *info.shape))
            return self._decoded(name, whole, 0, 1)[0, start:stop]
        return self._decoded(name, info, start, stop)

    def _decoded(self, name: str, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Rows of a quantized tensor, a few at a time: decoding takes several times the memory of its result."""
        values, block_bytes = _block(info.dtype)
        row = math.prod(info.shape[1:])
        row_bytes, step = row // values * block_bytes, max(1, _CHUNK // max(1, row))
        out = np.empty((stop - start, row), np.float32)
        for at in range(start, stop, step):
            codes = np.empty((min(step, stop - at), row_bytes), np.uint8)
            self._files.read_into(info.path, info.offset + at * row_bytes, codes, name)
            # A damaged scale shows in the result.
            with np.errstate(all="ignore"):
                out[at - start : at - start + len(codes)] = gguf.dequantize(codes, _quant_type(info.dtype))
        return out.reshape(stop - start, *info.shape[1:])


def _unpaired(rows: np.ndarray, width: int) -> np.ndarray:
    """Whole heads whose rotary pairs lie side by side, as heads that hold every pair's first, then every second."""
    pairs = rows.reshape(-1, width // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _renaming(architecture: str) -> Callable[[str], str]:
    """Hugging Face's name of a tensor; one that is not known keeps the file's."""
    model = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(model, 1)
    stems = {known.get_name(stem): stem for stem in (*_STEMS, *(_FIRST_LAYER + stem for stem in _LAYER_STEMS))}

    def rename(name: str) -> str:
        layer = _LAYER.match(name)
        first = f"blk.0.{name[layer.end() :]}" if layer else name
        stem, _, suffix = first.rpartition(".")
        if stem not in stems:
            return name
        found = f"{stems[stem]}.{suffix}"
        return found.replace(_FIRST_LAYER, f"model.layers.{layer[1]}.") if layer else found

    return lambda name: _ROPE_NAME if name == _ROPE_FACTORS else rename(name)


def _quant_type(dtype: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[dtype]


def _block(dtype: str) -> tuple[int, int]:
    return gguf.GGML_QUANT_SIZES[_quant_type(dtype)]


def _quantized(name: str, info: TensorInfo) -> Quantized:
    """A weight that is decoded, with what speaks against that."""
    fault = _fault(info)
    faults = () if fault is None else (f"tensor {name} has dtype {info.dtype}{fault}",)
    return Quantized(code_name=name, format=info.dtype, shape=info.shape, faults=faults)


def _fault(info: TensorInfo) -> str | None:
    if info.dtype not in gguf.GGMLQuantizationType.__members__:
        return ", which the installed gguf library does not know; update it"
    if not _decodes(info.dtype):
        return ", which the gguf library does not decode; convert the model to GGUF in another type"
    values = _block(info.dtype)[0]
    columns = info.shape[-1] if info.shape else 1
    return f" and rows of {columns} values, not a multiple of {values}" if columns % values else None


@functools.cache
def _decodes(dtype: str) -> bool:
    try:
        gguf.dequantize(np.zeros((1, _block(dtype)[1]), np.uint8), _quant_type(dtype))
    except NotImplementedError:
        return False
    return True
