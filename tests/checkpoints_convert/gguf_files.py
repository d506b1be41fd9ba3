"""Small GGUF files written with the gguf library, as llama.cpp's converter lays them out."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = dict[str, np.ndarray]

F32, F16, BF16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16"))
Q8_0, Q4_1 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 6, 2, 20, 96, 160, 101, 3
_SIZES = {
    "block_count": LAYERS,
    "context_length": 512,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50000.0,
    "vocab_size": VOCAB,
}
# Heads of Llama are as wide as they say; those of Qwen2, in transformers, as the hidden size and their number say.
_WIDTHS = {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM, "rope.dimension_count": HEAD_DIM}


def width_of(architecture: str) -> int:
    """The size of a head."""
    return HEAD_DIM if architecture == "llama" else HIDDEN // HEADS


def metadata_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """Metadata of the small model; ``changes`` by key below the architecture, ``__`` for a dot; None removes one."""
    values = _SIZES | (_WIDTHS if architecture == "llama" else {})
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return {f"{architecture}.{key}": value for key, value in values.items() if value is not None}


def random_tensors(architecture: str, *, tied: bool = False, bias: bool = False) -> Tensors:
    """Every tensor of the small model in float32, by Hugging Face's names and in its order of rows."""
    rng, width = np.random.default_rng(0), width_of(architecture)
    rows = {"q": HEADS * width, "k": KV_HEADS * width, "v": KV_HEADS * width}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCAB, HIDDEN)}
    for prefix in (f"model.layers.{i}." for i in range(LAYERS)):
        shapes |= {f"{prefix}{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (size, HIDDEN) for name, size in rows.items()}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HEADS * width)
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, FFN)
        if bias or architecture == "qwen2":
            shapes |= {f"{prefix}self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
        if bias and architecture == "llama":
            shapes[f"{prefix}self_attn.o_proj.bias"] = (HIDDEN,)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: x * (0.1 if x.ndim == 2 else 1) + ("norm" in name) for name, x in values.items()}


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor."""
    leaves = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, leaf = stem.split(".", 3)
        return f"blk.{layer}.{leaves[leaf]}.{suffix}"
    return f"{leaves[stem]}.{suffix}"


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that llama.cpp gives queries and keys: both values of a rotary pair side by side."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def stored_tensors(architecture: str, tensors: Tensors) -> Tensors:
    """The same tensors by GGUF's names and in its order of rows."""
    stored = {}
    for name, values in tensors.items():
        heads = {"q": HEADS, "k": KV_HEADS}.get(name.partition("self_attn.")[2][:1])
        stored[gguf_name(name)] = paired(values, heads) if architecture == "llama" and heads else values
    return stored


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Tensors,
    type_of: Callable[[str, np.ndarray], gguf.GGMLQuantizationType] = lambda name, values: F32,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Writes float32 tensors in the types that ``type_of`` chooses; others as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    for key, value in metadata.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds.get(type(value), writer.add_array)(key, value)
    for name, values in tensors.items():
        if values.dtype != np.float32:
            writer.add_tensor(name, values)
            continue
        kind = type_of(name, values)
        plain = kind in (F32, F16)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mixed(*kinds: gguf.GGMLQuantizationType) -> Callable[[str, np.ndarray], gguf.GGMLQuantizationType]:
    """Takes turns among ``kinds`` for matrices whose rows are whole blocks, F16 for other matrices, F32 for vectors."""
    turns: list[str] = []

    def type_of(name: str, values: np.ndarray) -> gguf.GGMLQuantizationType:
        if values.ndim < 2:
            return F32
        turns.append(name)
        return kinds[len(turns) % len(kinds)] if values.shape[-1] % 32 == 0 else F16

    return type_of


def write_small(
    path: Path,
    architecture: str = "llama",
    edit: Callable[[Tensors], object] | None = None,
    type_of: Callable[[str, np.ndarray], gguf.GGMLQuantizationType] = lambda name, values: F32,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
    metadata: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """The small model with its stored tensors changed by ``edit`` and its metadata by ``changes`` and ``metadata``."""
    stored = stored_tensors(architecture, random_tensors(architecture))
    if edit is not None:
        edit(stored)
    values = metadata_of(architecture, **changes) | dict(metadata or {})
    return write_gguf(path, architecture, values, stored, type_of, endianess)
