"""Small Hugging Face folders written with numpy alone, for the converter's tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from checkpoints_convert.synthetic import stored_shapes

Tensors = dict[str, np.ndarray]

_HYBRID = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    max_position_embeddings=256,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    eos_token_id=7,
    mtp_num_hidden_layers=1,
)
_EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=10, shared_expert_intermediate_size=14)
_PLAIN = dict(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=[7, 9],
)
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True, **_HYBRID},
    "moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {**_HYBRID, **_EXPERTS},
    },
    "next": {"architectures": ["Qwen3NextForCausalLM"], **_HYBRID, **_EXPERTS, "mlp_only_layers": [1]},
    "nemotron": {
        "architectures": ["NemotronHForCausalLM"],
        **_PLAIN,
        "hybrid_override_pattern": "MEM*EME-",
        "num_hidden_layers": 8,
        "head_dim": 10,
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "ssm_state_size": 5,
        "n_groups": 2,
        "conv_kernel": 3,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "moe_shared_expert_intermediate_size": 14,
        "moe_latent_size": 9,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, **_PLAIN},
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True, **_PLAIN},
}


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """A copy of one of ``CONFIGS`` with text fields changed; None removes a field."""
    config = json.loads(json.dumps(CONFIGS[kind]))
    text = config.get("text_config", config)
    text.update(changes)
    for name in [name for name, value in changes.items() if value is None]:
        del text[name]
    return config


def per_expert_names(backbone: bool = True, mtp: bool = True, layers: int = 4) -> frozenset[str]:
    """Names whose presence tells the name table that a layer stores its experts one by one."""
    names = {f"model.layers.{i}.mlp.experts.0.gate_proj.weight" for i in range(layers)} if backbone else set()
    names |= {"mtp.layers.0.mlp.experts.0.gate_proj.weight"} if mtp else set()
    return frozenset(names)


def random_tensors(config: dict[str, Any], names: frozenset[str] = frozenset(), seed: int = 0) -> Tensors:
    """Every tensor a checkpoint of this config holds, in bfloat16 apart from a few that are float32 as published."""
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(size=shape) for name, shape in sorted(stored_shapes(config, names).items())}
    wide = ("A_log", "linear_attn.norm.weight", "e_score_correction_bias")
    return {n: x.astype(np.float32 if n.endswith(wide) else ml_dtypes.bfloat16) for n, x in tensors.items()}


def write(folder: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """Writes config.json and the tensors; several shards get an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, weight_map = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_kind(folder: Path, kind: str, edit: Callable[[Tensors], object] | None = None, shards: int = 1) -> Path:
    """A folder of one of ``CONFIGS``, its tensors changed by ``edit``."""
    tensors = random_tensors(CONFIGS[kind])
    if edit is not None:
        edit(tensors)
    return write(folder, CONFIGS[kind], tensors, shards)


def assert_same_model(a: nnx.Module, b: nnx.Module) -> None:
    """Both trees hold the same bits."""
    left, right = (dict(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(m)))) for m in (a, b))
    assert left.keys() == right.keys()
    for path, x in left.items():
        assert x.dtype == right[path].dtype, path
        assert np.asarray(x).tobytes() == np.asarray(right[path]).tobytes(), path
