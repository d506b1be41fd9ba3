"""Orbax or trained parameters back out: a Hugging Face folder in the Qwen3.5 dense layout, in bfloat16."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from checkpoints_convert.families import qwen3_5
from checkpoints_convert.families.hybrid import parse_hybrid
from checkpoints_convert.layouts import ConvKernel, Layout, Same, Transposed
from wmtp_jax.config import ConfigError, ModelConfig
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import named_parameters

_BLOCK = re.compile(r"^blocks\.(\d+)\.(.*)$")


def export_qwen3_5(config: ModelConfig, model: Decoder, folder: Path, *, metadata: dict[str, str]) -> None:
    """Writes config.json, generation_config.json and model.safetensors (bfloat16; decay parameters float32).

    Raises ConfigError where reading config.json back would not give ``config``: the format cannot hold it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hf = hf_config(config)
    if parse_hybrid(hf) != config:
        raise ConfigError("this model cannot be described by a Qwen3.5 config.json: it uses parts that format lacks")
    parameters = named_parameters(model)
    tensors = {}
    for entry in qwen3_5.table(config, ()):
        value = _stored(np.asarray(_parameter(parameters, config, entry.parameter), np.float32), entry.layout)
        keep = entry.parameter.endswith(("A_log", "dt_bias"))
        tensors[entry.sources[0]] = np.ascontiguousarray(value if keep else value.astype(ml_dtypes.bfloat16))
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt", **metadata})
    weights.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
    generation = {"eos_token_id": list(config.eos_ids), "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a dense Qwen3.5 model."""
    a, d = config.attention, config.delta
    if d is None or config.dense is None or config.moe is not None or a.rope is None or a.rope.scaling is not None:
        raise ConfigError("only dense Qwen3.5 hybrids with plain rotary positions can be exported")
    mixers = {"attention": "full_attention", "delta": "linear_attention"}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense.ffn_size,
        "num_hidden_layers": len(config.blocks) // 2,
        "layer_types": [mixers[kind] for kind in config.blocks[::2]],
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "attention_bias": a.qkv_bias,
        "attn_output_gate": a.output_gate,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": a.rope.theta,
            "partial_rotary_factor": a.rope.rotary_dim / a.head_dim,
        },
        "linear_num_key_heads": d.num_key_heads,
        "linear_num_value_heads": d.num_value_heads,
        "linear_key_head_dim": d.key_dim,
        "linear_value_head_dim": d.value_dim,
        "linear_conv_kernel_dim": d.conv_kernel,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "mtp_num_hidden_layers": 1 if config.has_mtp else 0,
        "eos_token_id": list(config.eos_ids),
        "dtype": "bfloat16",
    }


def _parameter(parameters: dict[str, Any], config: ModelConfig, name: str) -> Any:
    """One parameter by its unstacked name, in which blocks are counted through all periods."""
    match = _BLOCK.match(name)
    if match is None:
        return parameters[name]
    period, slot = divmod(int(match[1]), len(config.pattern))
    return parameters[f"blocks.{slot}.{match[2]}"][period]


def _stored(value: np.ndarray, layout: Layout) -> np.ndarray:
    if isinstance(layout, Same):
        return value
    if isinstance(layout, Transposed):
        return value.T
    assert isinstance(layout, ConvKernel)
    return value.T[:, None, :]
