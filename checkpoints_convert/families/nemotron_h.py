"""Nemotron-H: Mamba2, position-free attention, dense or latent-expert feed-forwards, one mixer a layer.

Covers Nemotron-3 (experts, ``mtp.*`` draft head) and the older dense checkpoints.
"""

from collections.abc import Callable, Collection
from typing import Any

from checkpoints_convert.families.fields import Fields, refuse_sliding_window, refuse_unsupported
from checkpoints_convert.families.table import Entry, Family, Names, head_name, projections, stacked_experts
from checkpoints_convert.layouts import ConvKernel, Same, Transposed
from wmtp_jax.config import (
    AttentionConfig,
    BlockKind,
    ConfigError,
    DenseConfig,
    MambaConfig,
    ModelConfig,
    MoEConfig,
    fold_segments,
)

_LETTERS: dict[str, BlockKind] = {"M": "mamba", "*": "attention", "E": "moe", "-": "dense"}
# Both generations of names in layers_block_type.
_WORDS: dict[str, BlockKind] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "moe": "moe",
    "mlp": "dense",
}
_PREFIXES = ("backbone.", "model.", "language_model.backbone.", "language_model.model.")


def parse_config(hf: dict[str, Any], *, mtp_in_files: bool = False) -> ModelConfig:
    """Reads a config.json, nested under ``text_config`` or flat."""
    fields = Fields(hf)
    refuse_unsupported(fields)
    refuse_sliding_window(fields)
    _refuse(fields)
    blocks = _blocks(fields, "hybrid_override_pattern", "layers_block_type")
    first, *more = fold_segments(blocks)
    mtp = _mtp_blocks(fields)
    kinds = {*blocks, *mtp}
    heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=width,
        pattern=first.pattern,
        num_periods=first.num_periods,
        more_segments=tuple(more),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", fields.integer("attention_head_dim", width // heads)),
            # config.json may name rope_theta; no implementation of this architecture rotates.
            rope=None,
        ),
        mamba=_mamba(fields) if "mamba" in kinds else None,
        dense=_dense(fields) if "dense" in kinds else None,
        moe=_moe(fields) if "moe" in kinds else None,
        norm_eps=fields.number("layer_norm_epsilon", fields.number("norm_eps", 1e-5)),
        tie_embeddings=fields.tie_embeddings(),
        mtp_pattern=mtp,
        max_positions=fields.integer("max_position_embeddings", 4096),
        eos_ids=fields.eos_ids(),
    )


def _refuse(fields: Fields) -> None:
    """Names what a config asks for that these blocks do not compute."""
    wanted: dict[str, tuple[Any, Any]] = {
        "mlp_hidden_act": ("relu2", "relu2"),
        "mamba_hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "n_group": (1, 1),
        "topk_group": (1, 1),
        "n_shared_experts": (1, 1),
    }
    for name, (value, default) in wanted.items():
        if fields.get(name, default) != value:
            raise ConfigError(f"config.json: {name}={fields.get(name)!r} is not supported; only {value!r} is")


def _blocks(fields: Fields, letters: str, words: str) -> tuple[BlockKind, ...]:
    """The mixer of every layer, from a string such as ``ME*E`` or from a list of names."""
    name, known = (letters, _LETTERS) if fields.get(letters) is not None else (words, _WORDS)
    pattern = fields.get(name)
    if not isinstance(pattern, str | list) or not pattern:
        raise ConfigError(f"config.json: {letters} or {words} must name the mixer of every layer")
    unknown = [kind for kind in pattern if kind not in known]
    if unknown:
        raise ConfigError(f"config.json: {name} has a layer {unknown[0]!r}; known: {', '.join(known)}")
    return tuple(known[kind] for kind in pattern)


def _mtp_blocks(fields: Fields) -> tuple[BlockKind, ...]:
    layers = fields.count("num_nextn_predict_layers")
    if layers > 1:
        raise ConfigError(f"config.json: num_nextn_predict_layers={layers} is not supported; only one is")
    if not layers:
        return ()
    blocks = _blocks(fields, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    if set(blocks) & {"mamba"}:
        raise ConfigError("config.json: mtp_hybrid_override_pattern has a Mamba2 layer, which no draft head here has")
    return blocks


def _mamba(fields: Fields) -> MambaConfig:
    return MambaConfig(
        num_heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        state_size=fields.integer("ssm_state_size"),
        num_groups=fields.integer("n_groups", fields.integer("mamba_n_groups", 8)),
        conv_kernel=fields.integer("conv_kernel", fields.integer("mamba_d_conv", 4)),
        conv_bias=fields.flag("use_conv_bias", True),
        proj_bias=fields.flag("use_bias", False),
    )


def _dense(fields: Fields) -> DenseConfig:
    return DenseConfig(
        ffn_size=fields.integer("intermediate_size"), bias=fields.flag("mlp_bias", False), activation="relu2"
    )


def _moe(fields: Fields) -> MoEConfig:
    if fields.flag("mlp_bias", False):
        raise ConfigError("config.json: mlp_bias=true is not supported with experts")
    return MoEConfig(
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        ffn_size=fields.integer("moe_intermediate_size"),
        shared_ffn_size=fields.integer("moe_shared_expert_intermediate_size"),
        normalize_top_k=fields.flag("norm_topk_prob", True),
        router="sigmoid",
        activation="relu2",
        latent_size=fields.count("moe_latent_size"),
        routed_scaling=fields.number("routed_scaling_factor", 1.0),
        shared_gate=False,
    )


def table(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """Every parameter and the tensors it is made from."""
    prefix = next((p for p in _PREFIXES if f"{p}embeddings.weight" in stored), _PREFIXES[0])
    entries = [
        Entry("embedding", (f"{prefix}embeddings.weight",), Same()),
        Entry("final_norm.weight", (f"{prefix}norm_f.weight",), Same()),
    ]
    if not config.tie_embeddings:
        entries.append(Entry("lm_head.kernel", (head_name(stored),), Transposed()))
    for index, kind in enumerate(config.blocks):
        entries += _block_entries(f"blocks.{index}.", f"{prefix}layers.{index}.", kind, config, stored)
    return entries + _mtp_entries(config, stored)


def _mtp_entries(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    if not config.has_mtp:
        return []
    last = len(config.mtp_pattern) - 1
    entries = [
        Entry("mtp.embedding_norm.weight", ("mtp.layers.0.enorm.weight",), Same()),
        Entry("mtp.hidden_norm.weight", ("mtp.layers.0.hnorm.weight",), Same()),
        Entry("mtp.fc.kernel", ("mtp.layers.0.eh_proj.weight",), Transposed()),
        Entry("mtp.norm.weight", (f"mtp.layers.{last}.final_layernorm.weight",), Same()),
    ]
    for index, kind in enumerate(config.mtp_pattern):
        entries += _block_entries(f"mtp.blocks.{index}.", f"mtp.layers.{index}.", kind, config, stored)
    return entries


def _block_entries(
    block: str, layer: str, kind: BlockKind, config: ModelConfig, stored: Collection[str]
) -> list[Entry]:
    names: Names = {"norm.weight": ("norm.weight", Same()), **_MIXERS[kind](config)}
    entries = [Entry(block + ours, (layer + theirs,), layout) for ours, (theirs, layout) in names.items()]
    return entries + (_expert_entries(block, layer, config, stored) if kind == "moe" else [])


def _attention_names(config: ModelConfig) -> Names:
    return projections("mixer.", ("q_proj", "k_proj", "v_proj", "o_proj"))


def _mamba_names(config: ModelConfig) -> Names:
    m = config.mamba
    assert m is not None
    names = projections("mixer.", ("in_proj", "out_proj"), bias=m.proj_bias)
    names |= {f"mixer.{name}": (f"mixer.{name}", Same()) for name in ("A_log", "D", "dt_bias")}
    names["mixer.norm_weight"] = ("mixer.norm.weight", Same())
    names["mixer.conv_kernel"] = ("mixer.conv1d.weight", ConvKernel())
    if m.conv_bias:
        names["mixer.conv_bias"] = ("mixer.conv1d.bias", Same())
    return names


def _dense_names(config: ModelConfig) -> Names:
    assert config.dense is not None
    return projections("mixer.", ("up_proj", "down_proj"), bias=config.dense.bias)


def _moe_names(config: ModelConfig) -> Names:
    assert config.moe is not None
    names: Names = {
        "mixer.router.kernel": ("mixer.gate.weight", Transposed()),
        "mixer.correction_bias": ("mixer.gate.e_score_correction_bias", Same()),
    }
    for name in ("up_proj", "down_proj"):
        names[f"mixer.shared_expert.{name}.kernel"] = (f"mixer.shared_experts.{name}.weight", Transposed())
    if config.moe.latent_size:
        names["mixer.latent_in.kernel"] = ("mixer.fc1_latent_proj.weight", Transposed())
        names["mixer.latent_out.kernel"] = ("mixer.fc2_latent_proj.weight", Transposed())
    return names


def _expert_entries(block: str, layer: str, config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """The experts of one layer, packed or one by one: whichever this layer stores."""
    experts = f"{layer}mixer.experts."
    packed = f"{experts}up_proj" in stored
    return stacked_experts(block, experts, {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}, config, packed)


_MIXERS: dict[BlockKind, Callable[[ModelConfig], Names]] = {
    "attention": _attention_names,
    "mamba": _mamba_names,
    "dense": _dense_names,
    "moe": _moe_names,
}


def describe(config: ModelConfig) -> dict[str, Any] | None:
    """The config.json of a dense Mamba2 hybrid; None for any other model."""
    a, m = config.attention, config.mamba
    if m is None or config.dense is None or config.moe or config.delta or a.rope:
        return None
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense.ffn_size,
        "num_hidden_layers": len(config.blocks),
        "hybrid_override_pattern": "".join(letters[kind] for kind in config.blocks),
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "mamba_num_heads": m.num_heads,
        "mamba_head_dim": m.head_dim,
        "ssm_state_size": m.state_size,
        "n_groups": m.num_groups,
        "conv_kernel": m.conv_kernel,
        "use_conv_bias": m.conv_bias,
        "use_bias": m.proj_bias,
        "mlp_hidden_act": "relu2",
        "mlp_bias": config.dense.bias,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "num_nextn_predict_layers": 1 if config.has_mtp else 0,
        "mtp_hybrid_override_pattern": "".join(letters[kind] for kind in config.mtp_pattern),
        "eos_token_id": list(config.eos_ids),
        "dtype": "bfloat16",
    }


FAMILY = Family(
    name="Nemotron-H",
    architectures=("NemotronHForCausalLM",),
    model_types=("nemotron_h",),
    parse_config=parse_config,
    table=table,
    describe=describe,
)
