"""Llama-shaped dense decoders: Llama, Mistral without a window, Qwen2 and Qwen2.5."""

from collections.abc import Collection
from typing import Any

from checkpoints_convert.families.fields import (
    Fields,
    attention_config,
    layer_types,
    refuse_sliding_window,
    refuse_unsupported,
)
from checkpoints_convert.families.table import (
    ROPE_BUFFERS,
    Entry,
    Family,
    attention_names,
    backbone_entries,
    dense_names,
    ends_entries,
)
from wmtp_jax.config import ConfigError, DenseConfig, ModelConfig


def parse_config(hf: dict[str, Any], *, mtp_in_files: bool = False) -> ModelConfig:
    """Reads config.json. Qwen2 always has query, key and value biases; Llama has what ``attention_bias`` says."""
    fields = Fields(hf)
    refuse_unsupported(fields)
    qwen2 = hf.get("model_type") == "qwen2" or "Qwen2ForCausalLM" in (hf.get("architectures") or ())
    if not qwen2:
        refuse_sliding_window(fields)
    layers = fields.integer("num_hidden_layers")
    layer_types(fields, ("full_attention",), ["full_attention"] * layers)
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        pattern=("attention", "dense"),
        num_periods=layers,
        attention=attention_config(
            fields, head_dim=_head_dim(fields), rotary_share=1.0, qkv_bias=qwen2 or bias, out_bias=bias and not qwen2
        ),
        dense=DenseConfig(ffn_size=fields.integer("intermediate_size"), bias=fields.flag("mlp_bias", False)),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_embeddings=fields.tie_embeddings(),
        max_positions=fields.integer("max_position_embeddings", 2048),
        eos_ids=fields.eos_ids(),
    )


def _head_dim(fields: Fields) -> int:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if fields.get("head_dim") is None and hidden % heads:
        raise ConfigError(f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}")
    return fields.integer("head_dim", hidden // heads)


def table(config: ModelConfig, stored: Collection[str]) -> list[Entry]:
    """Every parameter and the tensor it is made from."""
    blocks = {"attention": attention_names, "dense": dense_names}
    return [*ends_entries(config, stored), *backbone_entries(config, stored, lambda kind: blocks[kind](config))]


FAMILY = Family(
    name="Llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
    model_types=("llama", "mistral", "qwen2"),
    parse_config=parse_config,
    table=table,
    skips=(ROPE_BUFFERS,),
)
