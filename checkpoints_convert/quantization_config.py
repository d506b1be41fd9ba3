"""What config.json says about quantized weights. The tensors themselves decide how they are read; this checks them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wmtp_jax.config import ConfigError

METHODS = ("fp8", "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed")
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """``block`` is rows by columns that share an FP8 scale; ``kinds`` are the weights' kinds, none where unsaid."""

    block: tuple[int, int] = DEFAULT_BLOCK
    kinds: frozenset[str] = frozenset()


def read_quantization(hf: dict[str, Any]) -> Quantization:
    """Reads ``quantization_config`` of either level. Raises ConfigError for methods that are not read here."""
    text = hf.get("text_config")
    for level in (hf, text if isinstance(text, dict) else {}):
        section = level.get("quantization_config") or level.get("compression_config")
        if section:
            return _parse(section)
    return Quantization()


def _parse(section: Any) -> Quantization:
    method = section.get("quant_method") if isinstance(section, dict) else section
    if not isinstance(section, dict) or method not in METHODS:
        raise ConfigError(
            f"config.json: quantization_config (quant_method={method!r}) is not supported; "
            f"known: {', '.join(METHODS)}; or convert the bfloat16 release"
        )
    if _object(section, "transform_config").get("config_groups"):
        raise ConfigError("config.json: quantization_config.transform_config (rotated weights) is not supported")
    groups = [_object(group, "weights") for group in _objects(section, "config_groups")]
    kinds = {f"{weights.get('type')}{weights.get('num_bits')}" for weights in groups if weights.get("num_bits")}
    if not groups:
        kinds = set(_algorithm_kinds(section))
    sizes = [section.get("weight_block_size"), *(weights.get("block_structure") for weights in groups)]
    blocks = {_block(size) for size in sizes if size}
    if len(blocks) > 1:
        raise ConfigError(f"config.json: quantization_config names several block sizes: {sorted(blocks)}")
    return Quantization(block=blocks.pop() if blocks else DEFAULT_BLOCK, kinds=frozenset(kinds))


def _algorithm_kinds(section: dict[str, Any]) -> Iterator[str]:
    """The kinds in names such as NVFP4 or FP8_PER_CHANNEL_PER_TOKEN, of the whole model or of single layers."""
    if section["quant_method"] == "fp8":
        yield "float8"
    layers = _objects(section, "quantized_layers")
    for algorithm in (section.get("quant_algo"), *(layer.get("quant_algo") for layer in layers)):
        yield from (f"float{bits}" for bits in (4, 8) if f"FP{bits}" in str(algorithm))


def _object(holder: dict[str, Any], name: str) -> dict[str, Any]:
    value = holder.get(name)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"config.json: quantization_config: {name}={value!r} must be an object")
    return value or {}


def _objects(holder: dict[str, Any], name: str) -> list[dict[str, Any]]:
    values = _object(holder, name)
    return [_object(values, key) for key in values]


def _block(size: Any) -> tuple[int, int]:
    """Rows by columns from ``[128, 128]`` or, as older compressed-tensors write it, ``"128x128"``."""
    lengths = size.split("x") if isinstance(size, str) else size
    if isinstance(lengths, list) and len(lengths) == 2 and all(str(length).isdecimal() for length in lengths):
        rows, columns = map(int, lengths)
        if rows and columns:
            return rows, columns
    raise ConfigError(f"config.json: quantization_config: block size {size!r} must be two positive whole numbers")
