"""Tiny hybrid models, every weight drawn away from its neutral value, whose draft heads are right now and then.

The target reads its next token mostly off the current one: the output head sees the embedding, bent by the blocks. The
draft head is given the same shortcut, so that without any training it agrees with the target on a good part of the
tokens, for the reason a trained head does.
"""

from functools import cache

import jax.numpy as jnp
import numpy as np

from wmtp_jax.config import (
    AttentionConfig,
    DeltaConfig,
    DenseConfig,
    MambaConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    Segment,
)
from wmtp_jax.models.decoder import Decoder, abstract, unroll
from wmtp_jax.models.parameters import named_parameters, with_parameters

_ROPE = RopeConfig(theta=1e4, rotary_dim=6)

BLOCK_SCALE = 0.7

CONFIGS = {
    "hybrid": ModelConfig(
        vocab_size=43,
        hidden_size=24,
        pattern=("delta", "dense", "attention", "dense"),
        num_periods=2,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=10, rope=_ROPE, output_gate=True, qk_norm=True),
        delta=DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=9),
        dense=DenseConfig(ffn_size=37),
        zero_centered_norm=True,
        tie_embeddings=True,
        mtp_pattern=("attention", "dense"),
    ),
    "experts": ModelConfig(
        vocab_size=31,
        hidden_size=20,
        pattern=("delta", "moe", "attention", "moe"),
        num_periods=1,
        attention=AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=14, rope=_ROPE, output_gate=True, qk_norm=True),
        delta=DeltaConfig(num_key_heads=1, num_value_heads=3, key_dim=7, value_dim=5, conv_kernel=3),
        moe=MoEConfig(num_experts=5, top_k=2, ffn_size=11, shared_ffn_size=13),
        zero_centered_norm=True,
        mtp_pattern=("attention", "moe"),
    ),
    "attention": ModelConfig(
        vocab_size=29,
        hidden_size=18,
        pattern=("attention", "dense"),
        num_periods=2,
        attention=AttentionConfig(num_heads=4, num_kv_heads=1, head_dim=8, rope=None, qkv_bias=True),
        dense=DenseConfig(ffn_size=25),
        mtp_pattern=("attention",),
    ),
    "recurrent": ModelConfig(
        vocab_size=37,
        hidden_size=22,
        pattern=("delta", "dense", "delta", "attention"),
        num_periods=1,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=12, rope=_ROPE),
        delta=DeltaConfig(num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=8, conv_kernel=5),
        dense=DenseConfig(ffn_size=29),
        mtp_pattern=("attention", "dense"),
    ),
    # Three segments, heads in groups, no positions, experts behind a projection in target and draft.
    "mamba": ModelConfig(
        vocab_size=33,
        hidden_size=20,
        pattern=("mamba", "moe"),
        num_periods=2,
        more_segments=(
            Segment(pattern=("mamba", "attention", "dense"), num_periods=1),
            Segment(pattern=("attention", "mamba"), num_periods=2),
        ),
        attention=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10, rope=None),
        mamba=MambaConfig(num_heads=6, head_dim=7, state_size=5, num_groups=3),
        dense=DenseConfig(ffn_size=27, activation="relu2"),
        moe=MoEConfig(
            num_experts=5,
            top_k=2,
            ffn_size=11,
            shared_ffn_size=13,
            router="sigmoid",
            activation="relu2",
            latent_size=9,
            routed_scaling=1.7,
            shared_gate=False,
        ),
        mtp_pattern=("attention", "moe"),
    ),
    # So few tokens that the distribution of short texts can be counted.
    "counted": ModelConfig(
        vocab_size=6,
        hidden_size=10,
        pattern=("attention", "dense"),
        num_periods=1,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, rope=_ROPE),
        dense=DenseConfig(ffn_size=14),
        mtp_pattern=("attention",),
    ),
}


def tiny_model(name: str, seed: int, *, unrolled: bool = False) -> Decoder:
    """A float32 model of ``CONFIGS[name]`` with weights drawn from ``seed``; models of one name share programs."""
    template, rng = _template(name), np.random.default_rng(seed)
    drawn = {key: _draw(key, leaf.shape, CONFIGS[name], rng) for key, leaf in named_parameters(template).items()}
    if template.mtp is not None:
        _shortcut(drawn, rng)
    model = with_parameters(template, {key: jnp.asarray(value, jnp.float32) for key, value in drawn.items()})
    return unroll(model) if unrolled else model


@cache
def _template(name: str) -> Decoder:
    return abstract(CONFIGS[name])


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape)
    if name.endswith("A_log"):
        return 0.7 * noise - 1.0
    if name.endswith(".D"):
        return noise
    if name.endswith("dt_bias"):
        return noise - 1.0
    if name == "final_norm.weight":
        # Of either sign, or a tied head would only ever repeat the current token.
        return 1.3 * noise - (1.0 if config.zero_centered_norm else 0.0)
    if "norm" in name:
        return 0.3 * noise + (0.0 if config.zero_centered_norm and "mixer.norm" not in name else 1.0)
    if name.endswith("bias"):
        return 0.3 * noise
    if name == "embedding":
        return noise
    fan_in = noise / shape[-2] ** 0.5
    if "lm_head" in name:
        return 3.0 * fan_in
    if "router" in name:
        return 2.0 * fan_in
    # Blocks that outweigh the stream they add to make a chaotic model, in which rounding alone exceeds any tolerance.
    return (
        BLOCK_SCALE * fan_in
        if any(part in name for part in ("out_proj", "o_proj", "down_proj", "latent_out"))
        else fan_in
    )


def _shortcut(drawn: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Lets the draft head see the embedding of the last token nearly as the target sees it."""
    width = drawn["mtp.norm.weight"].shape[0]
    hidden_part = 0.3 * rng.standard_normal((width, width)) / width**0.5
    drawn["mtp.fc.kernel"] = np.concatenate([np.eye(width), hidden_part])
    drawn["mtp.norm.weight"] = drawn["final_norm.weight"] + 0.05 * rng.standard_normal(width)
