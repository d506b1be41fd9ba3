"""What a model folder or a GGUF file holds, told from its headers: no weight is read."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints_convert.open_source import local_path, open_source
from checkpoints_convert.plan import make_plan
from checkpoints_convert.tensor_files import DTYPES
from wmtp_jax.checkpoint import MODEL_NAME, parameter_shapes, read_index, read_model_config
from wmtp_jax.config import BlockKind, ModelConfig
from wmtp_jax.plan.sizes import sizes_of_config

_KINDS: tuple[BlockKind, ...] = ("attention", "delta", "mamba", "dense", "moe")
STATE_BYTES = 4


def inspect(path: str | Path) -> dict[str, Any]:
    """Describes a converted folder, a Hugging Face folder or a GGUF file, as a dictionary that JSON can hold.

    ``problems`` lists what would stop a conversion. Raises UserError for what cannot be read at all.
    """
    found = local_path(path)
    if (found / MODEL_NAME).is_file():
        return _inspect_converted(found)
    return _inspect_source(found)


def _inspect_converted(folder: Path) -> dict[str, Any]:
    config, stored = read_model_config(folder), read_index(folder)
    shapes = {name: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype)) for name, p in stored.items()}
    expected = parameter_shapes(config, jnp.dtype(jnp.bfloat16))
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    problems = [f"missing parameter {name}" for name in sorted(expected.keys() - shapes.keys())]
    problems += [f"unknown parameter {name}" for name in sorted(shapes.keys() - expected.keys())]
    return {
        "path": str(folder),
        "format": "converted",
        "family": None,
        "stored_values": _stored_values((spelled.get(s.dtype, str(s.dtype)), s.shape) for s in shapes.values()),
        **_describe(config, shapes),
        "skipped": {},
        "problems": problems,
    }


def _inspect_source(path: Path) -> dict[str, Any]:
    with open_source(path) as files:
        values = _stored_values((info.dtype, info.shape) for info in files.tensors.values())
        dtype = DTYPES.get(next(iter(values), ""), jnp.dtype(jnp.bfloat16))
        plan = make_plan(files, jnp.dtype(dtype))
    return {
        "path": str(path),
        "format": files.format,
        "family": plan.family.name,
        "stored_values": values,
        **_describe(plan.config, plan.shapes),
        "skipped": plan.skipped,
        "problems": list(plan.problems),
    }


def _stored_values(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """How many values are stored in each format, most first; those of quantized weights count, their scales do not."""
    values = Counter[str]()
    for stored_as, shape in tensors:
        values[stored_as] += math.prod(shape)
    return dict(values.most_common())


def _describe(config: ModelConfig, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    dtype = shapes["embedding"].dtype if "embedding" in shapes else jnp.dtype(jnp.bfloat16)
    return {
        "layers": {
            # Where layers are one block each, their feed-forwards count too.
            "total": len(config.blocks) if config.mamba else config.count("attention") + config.count("delta"),
            **{kind: config.count(kind) for kind in _KINDS if config.count(kind)},
        },
        "has_mtp": config.has_mtp,
        "max_positions": config.max_positions,
        "eos_ids": list(config.eos_ids),
        "dtype": str(dtype),
        "parameters": _sizes(shapes, lambda shape: math.prod(shape.shape)),
        "parameter_bytes": _sizes(shapes, lambda shape: math.prod(shape.shape) * shape.dtype.itemsize),
        "cache_bytes_per_token": _cache_bytes(config, dtype.itemsize),
        "recurrent_state_bytes_per_row": _state_bytes(config, dtype.itemsize),
    }


def _sizes(shapes: Mapping[str, jax.ShapeDtypeStruct], size: Any) -> dict[str, int]:
    def total(*prefixes: str) -> int:
        return sum(size(shape) for name, shape in shapes.items() if name.startswith(prefixes))

    return {"total": total(""), "embeddings": total("embedding", "lm_head."), "draft_head": total("mtp.")}


def _cache_bytes(config: ModelConfig, itemsize: int) -> dict[str, float]:
    """Keys and values a token, in the dtype of the weights; ``draft_share`` is of target and draft together."""
    a = config.attention
    layer = 2 * a.num_kv_heads * a.head_dim * itemsize
    target, draft = layer * config.count("attention"), layer * config.mtp_pattern.count("attention")
    share = draft / (target + draft) if draft else 0.0
    return {"target": target, "draft": draft, "draft_share": share}


def _state_bytes(config: ModelConfig, itemsize: int) -> int:
    """Float32 memory and convolution tail of every recurrent layer, for one sequence of any length."""
    sizes = sizes_of_config(config)
    return sizes.state_elements * STATE_BYTES + sizes.tail_elements * itemsize
