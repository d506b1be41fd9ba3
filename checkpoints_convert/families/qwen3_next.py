"""Qwen3-Next: Qwen3.5's layers with fused delta projections whose rows are grouped by key head."""

from collections.abc import Collection

from checkpoints_convert.families.hybrid import hybrid_table, parse_hybrid
from checkpoints_convert.families.table import ROPE_BUFFERS, Entry, Family, Names
from checkpoints_convert.layouts import KeyHeadGroups
from wmtp_jax.config import DeltaConfig, ModelConfig


def table(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """Every parameter and the tensors it is made from."""
    return hybrid_table(config, stored, _fused_names)


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
    parse_config=parse_hybrid,
    table=table,
    skips=(ROPE_BUFFERS,),
)
