"""Qwen3.5 and Qwen3.6, dense and MoE. Their delta projections are stored unfused, as our modules hold them."""

from collections.abc import Collection
from typing import Any

from checkpoints_convert.families.hybrid import delta_names, parse_hybrid
from checkpoints_convert.families.table import (
    ROPE_BUFFERS,
    VISION,
    Entry,
    Family,
    Names,
    attention_names,
    backbone_entries,
    dense_names,
    ends_entries,
    moe_names,
    mtp_entries,
    projections,
)
from wmtp_jax.config import BlockKind, ModelConfig


def parse_config(hf: dict[str, Any], *, mtp_in_files: bool = False) -> ModelConfig:
    """Reads config.json, nested under ``text_config`` or flat."""
    return parse_hybrid(hf, mtp_in_files=mtp_in_files)


def table(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """Every parameter and the tensors it is made from."""

    def names(kind: BlockKind) -> Names:
        if kind == "delta":
            inputs = projections("linear_attn.", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
            return delta_names() | inputs
        return {"attention": attention_names, "dense": dense_names, "moe": moe_names}[kind](config)

    return [
        *ends_entries(config, stored),
        *backbone_entries(config, stored, names),
        *mtp_entries(config, stored, names),
    ]


FAMILY = Family(
    name="Qwen3.5",
    architectures=(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
    ),
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    parse_config=parse_config,
    table=table,
    skips=(VISION, ROPE_BUFFERS),
)
