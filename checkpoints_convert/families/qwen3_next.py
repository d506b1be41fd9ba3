"""Qwen3-Next: Qwen3.5's layers with fused delta projections whose rows are grouped by key head."""

from collections.abc import Collection
from typing import Any

from checkpoints_convert.families.hybrid import delta_names, parse_hybrid
from checkpoints_convert.families.table import (
    ROPE_BUFFERS,
    Entry,
    Family,
    Names,
    attention_names,
    backbone_entries,
    dense_names,
    ends_entries,
    moe_names,
    mtp_entries,
)
from checkpoints_convert.layouts import KeyHeadGroups
from wmtp_jax.config import BlockKind, DeltaConfig, ModelConfig


def parse_config(hf: dict[str, Any], *, mtp_in_files: bool = False) -> ModelConfig:
    """Reads config.json, which does not mention the draft head: the files decide."""
    return parse_hybrid(hf, mtp_in_files=mtp_in_files)


def table(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """Every parameter and the tensors it is made from."""

    def names(kind: BlockKind) -> Names:
        if kind == "delta":
            assert config.delta is not None
            return delta_names() | _fused_names(config.delta)
        return {"attention": attention_names, "dense": dense_names, "moe": moe_names}[kind](config)

    return [
        *ends_entries(config, stored),
        *backbone_entries(config, stored, names),
        *mtp_entries(config, stored, names),
    ]


def _fused_names(d: DeltaConfig) -> Names:
    repeats = d.num_value_heads // d.num_key_heads
    values = repeats * d.value_dim
    qkvz, ba = (d.key_dim, d.key_dim, values, values), (repeats, repeats)

    def part(fused: str, widths: tuple[int, ...], *parts: int) -> tuple[str, KeyHeadGroups]:
        return f"linear_attn.{fused}.weight", KeyHeadGroups(d.num_key_heads, widths, parts)

    return {
        "mixer.in_proj_qkv.kernel": part("in_proj_qkvz", qkvz, 0, 1, 2),
        "mixer.in_proj_z.kernel": part("in_proj_qkvz", qkvz, 3),
        "mixer.in_proj_b.kernel": part("in_proj_ba", ba, 0),
        "mixer.in_proj_a.kernel": part("in_proj_ba", ba, 1),
    }


FAMILY = Family(
    name="Qwen3-Next",
    architectures=("Qwen3NextForCausalLM",),
    model_types=("qwen3_next",),
    parse_config=parse_config,
    table=table,
    skips=(ROPE_BUFFERS,),
)
