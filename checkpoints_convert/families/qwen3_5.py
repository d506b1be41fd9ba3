"""Qwen3.5 and Qwen3.6, dense and MoE. Their delta projections are stored unfused, as our modules hold them."""

from collections.abc import Collection

from checkpoints_convert.families.hybrid import hybrid_table, parse_hybrid
from checkpoints_convert.families.table import ROPE_BUFFERS, VISION, Entry, Family, Names, projections
from wmtp_jax.config import DeltaConfig, ModelConfig


def table(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """Every parameter and the tensors it is made from."""
    return hybrid_table(config, stored, _delta_inputs)


def _delta_inputs(_: DeltaConfig) -> Names:
    return projections("linear_attn.", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))


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
    skips=(VISION, ROPE_BUFFERS),
)
