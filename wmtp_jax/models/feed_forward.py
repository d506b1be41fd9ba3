"""Feed-forward blocks: dense SwiGLU and softmax-routed experts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from wmtp_jax.config import ModelConfig
from wmtp_jax.models.layers import Linear


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, ffn_size: int, bias: bool = False, *, rngs: nnx.Rngs, dtype: DTypeLike):
        make: dict[str, Any] = dict(bias=bias, rngs=rngs, dtype=dtype)
        self.gate_proj = Linear(hidden_size, ffn_size, **make)
        self.up_proj = Linear(hidden_size, ffn_size, **make)
        self.down_proj = Linear(ffn_size, hidden_size, **make)

    def __call__(self, x: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nnx.Module):
    """Top-k experts by softmax over all of them, renormalised, plus a shared expert behind a sigmoid gate."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        moe = config.moe
        assert moe is not None
        self.config = moe
        make: dict[str, Any] = dict(rngs=rngs, dtype=dtype)
        self.router = Linear(config.hidden_size, moe.num_experts, **make)
        self.gate_up_proj = _expert_kernel(rngs, moe.num_experts, config.hidden_size, 2 * moe.ffn_size, dtype)
        self.down_proj = _expert_kernel(rngs, moe.num_experts, moe.ffn_size, config.hidden_size, dtype)
        shared = moe.shared_ffn_size
        self.shared_expert = SwiGLU(config.hidden_size, shared, **make) if shared else None
        self.shared_expert_gate = Linear(config.hidden_size, 1, **make) if shared else None

    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        flat = x.reshape(-1, x.shape[-1])
        y = self._routed(flat)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            y = y + jax.nn.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return y.reshape(x.shape)

    def _routed(self, x: Float[Array, "S M"]) -> Float[Array, "S M"]:
        """Dropless: token copies sorted by expert, one ragged product a projection.

        XLA computes ragged products densely on CPUs, every copy through every expert: fine for tests and small models
        there, not for large ones.
        """
        weights, experts = jax.lax.top_k(jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1), self.config.top_k)
        if self.config.normalize_top_k:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.config.num_experts)
        token = order // self.config.top_k
        gate, up = jnp.split(jax.lax.ragged_dot(x[token], self.gate_up_proj[...], sizes), 2, axis=-1)
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.down_proj[...], sizes)
        copies = out[jnp.argsort(order)].reshape(*weights.shape, -1)
        return jnp.einsum("skm,sk->sm", copies.astype(jnp.float32), weights).astype(x.dtype)


def _expert_kernel(rngs: nnx.Rngs, experts: int, size_in: int, size_out: int, dtype: DTypeLike) -> nnx.Param:
    values = jax.random.normal(rngs.params(), (experts, size_in, size_out)) / math.sqrt(size_in)
    return nnx.Param(values.astype(dtype))
