"""Qwen3.5 and Qwen3.6, dense and MoE. Their delta projections are stored unfused, as our modules hold them."""

from collections.abc import Collection
from typing import Any

from checkpoints_convert.families.hybrid import hybrid_table, parse_hybrid
from checkpoints_convert.families.table import ROPE_BUFFERS, VISION, Entry, Family, Names, projections
from wmtp_jax.config import DeltaConfig, ModelConfig


def table(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """Every parameter and the tensors it is made from."""
    return hybrid_table(config, stored, _delta_inputs)


def _delta_inputs(_: DeltaConfig) -> Names:
    return projections("linear_attn.", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))


def describe(config: ModelConfig) -> dict[str, Any] | None:
    """The config.json of a dense hybrid with plain rotary positions; None for any other model."""
    a, d = config.attention, config.delta
    if d is None or config.dense is None or config.moe or config.mamba or a.rope is None or a.rope.scaling:
        return None
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


FAMILY = Family(
    name="Qwen3.5",
    architectures=(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
    ),
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    parse_config=parse_hybrid,
    table=table,
    describe=describe,
    skips=(VISION, ROPE_BUFFERS),
)
