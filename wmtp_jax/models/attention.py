"""Grouped-query attention: projections only. Where keys and values live is the caller's business."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.config import ModelConfig
from wmtp_jax.models.layers import Linear, RMSNorm, apply_rope


class Attention(nnx.Module):
    """Projections, per-head norms, rotary positions and output gate of one attention block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        a = config.attention
        self.config = a
        # With an output gate each head's query and gate stand side by side: [q_0 | gate_0 | q_1 | gate_1 | ...].
        query_size = a.num_heads * a.head_dim * (2 if a.output_gate else 1)
        kv_size = a.num_kv_heads * a.head_dim
        make: dict[str, Any] = dict(rngs=rngs, dtype=dtype)
        self.q_proj = Linear(config.hidden_size, query_size, bias=a.qkv_bias, **make)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=a.qkv_bias, **make)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=a.qkv_bias, **make)
        self.o_proj = Linear(a.num_heads * a.head_dim, config.hidden_size, bias=a.out_bias, **make)
        norm = (a.head_dim, config.norm_eps, config.zero_centered_norm, dtype)
        self.q_norm = RMSNorm(*norm) if a.qk_norm else None
        self.k_norm = RMSNorm(*norm) if a.qk_norm else None

    def queries(
        self, x: Float[Array, "B T M"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H D"] | None]:
        """Rotated queries, and the output gate before its sigmoid where the model has one."""
        q = self.q_proj(x).reshape(*x.shape[:2], self.config.num_heads, -1)
        gate = None
        if self.config.output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return apply_rope(q, positions, self.config.rope), gate

    def keys_values(
        self, x: Float[Array, "B T M"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Rotated keys, and values."""
        shape = (*x.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        k, v = self.k_proj(x).reshape(shape), self.v_proj(x).reshape(shape)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return apply_rope(k, positions, self.config.rope), v

    def output(self, attended: Float[Array, "B T H D"], gate: Float[Array, "B T H D"] | None) -> Float[Array, "B T M"]:
        """Gates the attended values and projects them back to the model width."""
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate)
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))
