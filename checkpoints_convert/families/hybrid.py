"""What Qwen3-Next and Qwen3.5 share: gated attention, Gated DeltaNet, dense or MoE layers, the ``mtp.*`` head."""

from collections.abc import Callable, Collection
from typing import Any

from checkpoints_convert.families.fields import Fields, attention_config, layer_types, refuse_unsupported
from checkpoints_convert.families.table import (
    Entry,
    Names,
    attention_names,
    backbone_entries,
    dense_names,
    ends_entries,
    moe_names,
    mtp_entries,
    projections,
)
from checkpoints_convert.layouts import ConvKernel, Same
from wmtp_jax.config import BlockKind, ConfigError, DeltaConfig, DenseConfig, ModelConfig, MoEConfig, fold_pattern

_MIXERS: dict[str, BlockKind] = {"full_attention": "attention", "linear_attention": "delta"}


def parse_hybrid(hf: dict[str, Any], *, mtp_in_files: bool = False) -> ModelConfig:
    """Reads a config.json, nested under ``text_config`` or flat; dense where it names no experts.

    The files decide about the draft head where the config does not mention it, as Qwen3-Next's.
    """
    fields = Fields(hf)
    refuse_unsupported(fields)
    experts = fields.count("num_experts")
    blocks = _blocks(fields, has_experts=bool(experts))
    pattern, periods = fold_pattern(blocks, per_layer=2)
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        pattern=pattern,
        num_periods=periods,
        attention=attention_config(
            fields,
            head_dim=fields.integer("head_dim", 256),
            rotary_share=0.25,
            output_gate=fields.flag("attn_output_gate", True),
            qk_norm=True,
            qkv_bias=bias,
            out_bias=bias,
        ),
        delta=_delta(fields) if "delta" in blocks else None,
        dense=DenseConfig(ffn_size=fields.integer("intermediate_size")) if "dense" in blocks else None,
        moe=_moe(fields) if experts else None,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        zero_centered_norm=True,
        tie_embeddings=fields.tie_embeddings(),
        mtp_pattern=("attention", "moe" if experts else "dense") if _has_mtp(fields, mtp_in_files) else (),
        max_positions=fields.integer("max_position_embeddings", 32768),
        eos_ids=fields.eos_ids(),
    )


def _blocks(fields: Fields, *, has_experts: bool) -> list[BlockKind]:
    layers, interval = fields.integer("num_hidden_layers"), fields.integer("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    mixers = layer_types(fields, tuple(_MIXERS), default)
    step, dense_layers = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    if not isinstance(dense_layers, list):
        raise ConfigError(f"config.json: mlp_only_layers={dense_layers!r} must be a list of layer numbers")
    blocks: list[BlockKind] = []
    for index, mixer in enumerate(mixers):
        routed = has_experts and index not in dense_layers and (index + 1) % step == 0
        blocks.append(_MIXERS[mixer])
        blocks.append("moe" if routed else "dense")
    return blocks


def _delta(fields: Fields) -> DeltaConfig:
    return DeltaConfig(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 4),
    )


def _moe(fields: Fields) -> MoEConfig:
    return MoEConfig(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        ffn_size=fields.integer("moe_intermediate_size"),
        shared_ffn_size=fields.count("shared_expert_intermediate_size"),
        normalize_top_k=fields.flag("norm_topk_prob", True),
    )


def _has_mtp(fields: Fields, mtp_in_files: bool) -> bool:
    if fields.flag("mtp_use_dedicated_embeddings", False):
        raise ConfigError("config.json: mtp_use_dedicated_embeddings=true is not supported")
    layers = fields.get("mtp_num_hidden_layers", fields.get("num_nextn_predict_layers"))
    if layers is None:
        return mtp_in_files
    if isinstance(layers, bool) or layers not in (0, 1):
        raise ConfigError(f"config.json: mtp_num_hidden_layers={layers!r} is not supported; only one layer is")
    return layers == 1


def hybrid_table(
    config: ModelConfig, stored: Collection[str], delta_inputs: Callable[[DeltaConfig], Names]
) -> list[Entry]:
    """Every parameter and the tensors it is made from; ``delta_inputs`` are the family's own input projections."""

    def names(kind: BlockKind) -> Names:
        if kind == "delta":
            assert config.delta is not None
            return _delta_names() | delta_inputs(config.delta)
        return {"attention": attention_names, "dense": dense_names, "moe": moe_names}[kind](config)

    return [
        *ends_entries(config, stored),
        *backbone_entries(config, stored, names),
        *mtp_entries(config, stored, names),
    ]


def _delta_names() -> Names:
    """A Gated DeltaNet block behind its norm, without its input projections."""
    names: Names = {
        "norm.weight": ("input_layernorm.weight", Same()),
        "mixer.conv_kernel": ("linear_attn.conv1d.weight", ConvKernel()),
        "mixer.A_log": ("linear_attn.A_log", Same()),
        "mixer.dt_bias": ("linear_attn.dt_bias", Same()),
        "mixer.norm.weight": ("linear_attn.norm.weight", Same()),
    }
    return names | projections("linear_attn.", ("out_proj",))
