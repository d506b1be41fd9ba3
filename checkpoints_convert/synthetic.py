"""Writes folders of random weights of any size, in a published layout: ``python -m checkpoints_convert.synthetic OUT``.

Values stream to disk, so a folder may be far larger than memory. For measuring the converter and for tests; the
weights mean nothing.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from checkpoints_convert.families import find_family
from checkpoints_convert.tensor_files import INDEX_NAME
from wmtp_jax.checkpoint import parameter_shapes

SHARD_BYTES = 2 * 2**30
_CHUNK = 8 * 2**20
_NO_NAMES: frozenset[str] = frozenset()


def qwen3_5_config(gigabytes: float) -> dict[str, Any]:
    """A config.json of the 4B release's width, with enough layers for ``gigabytes`` of bfloat16."""
    text: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "eos_token_id": 248044,
    }
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": text,
    }
    base = _bytes(stored_shapes(config))
    period = _bytes(stored_shapes({**config, "text_config": {**text, "num_hidden_layers": 8}})) - base
    text["num_hidden_layers"] += 4 * max(0, math.ceil((gigabytes * 1e9 - base) / period))
    return config


def nemotron_config(gigabytes: float) -> dict[str, Any]:
    """A config.json of Nemotron-3-Super's width and expert shapes; the number of experts makes up ``gigabytes``."""
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 4096,
        "hybrid_override_pattern": "MEM*E",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "n_routed_experts": 22,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
        "moe_latent_size": 1024,
        "routed_scaling_factor": 5.0,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": [2, 11],
    }
    base = _bytes(stored_shapes(config))
    expert = _bytes(stored_shapes({**config, "n_routed_experts": 23})) - base
    config["n_routed_experts"] += max(0, math.ceil((gigabytes * 1e9 - base) / expert))
    return config


def stored_shapes(config: dict[str, Any], names: frozenset[str] = _NO_NAMES) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this config holds, by the name table; ``names`` picks between layouts."""
    family = find_family(config)
    model = family.parse_config(config)
    shapes = parameter_shapes(model, jnp.dtype(jnp.bfloat16))
    stored: dict[str, tuple[int, ...]] = {}
    for entry in family.table(model, names):
        expected = entry.layout.source_shapes(shapes[entry.parameter].shape, entry.sources)
        stored |= dict(zip(entry.sources, expected, strict=True))
    return stored


def write_synthetic(out: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Writes config.json, sharded bfloat16 safetensors and their index."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in stored_shapes(config).items():
        if shards[-1] and _bytes(shards[-1]) + _bytes({name: shape}) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    rng, weight_map = np.random.default_rng(seed), {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(out / file, tensors, rng)
        weight_map |= dict.fromkeys(tensors, file)
    (out / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_shard(path: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator) -> None:
    header, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            for start in range(0, math.prod(shape), _CHUNK):
                count = min(_CHUNK, math.prod(shape) - start)
                values = 0.04 * (rng.random(count, dtype=np.float32) - 0.5)
                file.write(values.astype(ml_dtypes.bfloat16).tobytes())


def _bytes(tensors: dict[str, tuple[int, ...]]) -> int:
    return sum(2 * math.prod(shape) for shape in tensors.values())


_CONFIGS = {"qwen3_5": qwen3_5_config, "nemotron_h": nemotron_config}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a synthetic checkpoint folder with random weights.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=sorted(_CONFIGS), default="qwen3_5")
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_synthetic(arguments.out, _CONFIGS[arguments.family](arguments.gigabytes), arguments.seed)


if __name__ == "__main__":
    main()
