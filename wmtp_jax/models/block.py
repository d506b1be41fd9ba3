"""One residual block: a norm and the mixer it feeds."""

from flax import nnx
from jax.typing import DTypeLike

from wmtp_jax.config import BlockKind, ModelConfig
from wmtp_jax.models.attention import Attention
from wmtp_jax.models.delta_net import DeltaNet
from wmtp_jax.models.feed_forward import MoE, ReLU2, SwiGLU, feed_forward
from wmtp_jax.models.layers import RMSNorm
from wmtp_jax.models.mamba import Mamba2

Mixer = Attention | DeltaNet | Mamba2 | SwiGLU | ReLU2 | MoE


class Block(nnx.Module):
    """Norm and mixer; the caller adds the residual, since attention and recurrent mixers need their caches."""

    def __init__(self, kind: BlockKind, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.zero_centered_norm, dtype)
        self.mixer = _make_mixer(kind, config, rngs, dtype)


def _make_mixer(kind: BlockKind, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike) -> Mixer:
    if kind == "attention":
        return Attention(config, rngs=rngs, dtype=dtype)
    if kind == "delta":
        return DeltaNet(config, rngs=rngs, dtype=dtype)
    if kind == "mamba":
        return Mamba2(config, rngs=rngs, dtype=dtype)
    if kind == "moe":
        return MoE(config, rngs=rngs, dtype=dtype)
    assert config.dense is not None
    dense = config.dense
    return feed_forward(dense.activation, config.hidden_size, dense.ffn_size, dense.bias, rngs=rngs, dtype=dtype)
