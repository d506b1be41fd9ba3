"""Feed-forward blocks: dense, and routed to experts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.config import Activation, ModelConfig
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


class ReLU2(nnx.Module):
    """``down(relu(up(x))^2)``."""

    def __init__(self, hidden_size: int, ffn_size: int, bias: bool = False, *, rngs: nnx.Rngs, dtype: DTypeLike):
        make: dict[str, Any] = dict(bias=bias, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(hidden_size, ffn_size, **make)
        self.down_proj = Linear(ffn_size, hidden_size, **make)

    def __call__(self, x: Float[Array, "*S M"]) -> Float[Array, "*S M"]:
        return self.down_proj(_relu2(self.up_proj(x)))


def feed_forward(
    activation: Activation, hidden_size: int, ffn_size: int, bias: bool = False, *, rngs: nnx.Rngs, dtype: DTypeLike
) -> SwiGLU | ReLU2:
    """A dense feed-forward of either kind."""
    return {"swiglu": SwiGLU, "relu2": ReLU2}[activation](hidden_size, ffn_size, bias, rngs=rngs, dtype=dtype)


class MoE(nnx.Module):
    """Top-k experts, softmax- or sigmoid-routed, and a shared expert; see ``MoEConfig``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        moe, width = config.moe, config.hidden_size
        assert moe is not None
        self.config = moe
        make: dict[str, Any] = dict(rngs=rngs, dtype=dtype)
        self.router = Linear(width, moe.num_experts, **make)
        sigmoid = moe.router == "sigmoid"
        self.correction_bias = nnx.Param(jnp.zeros(moe.num_experts, jnp.float32)) if sigmoid else None
        inner = moe.latent_size or width
        self.latent_in = Linear(width, inner, **make) if moe.latent_size else None
        self.latent_out = Linear(inner, width, **make) if moe.latent_size else None
        gated = moe.activation == "swiglu"
        self.gate_up_proj = _expert_kernel(rngs, moe.num_experts, inner, 2 * moe.ffn_size, dtype) if gated else None
        self.up_proj = None if gated else _expert_kernel(rngs, moe.num_experts, inner, moe.ffn_size, dtype)
        self.down_proj = _expert_kernel(rngs, moe.num_experts, moe.ffn_size, inner, dtype)
        shared = moe.shared_ffn_size
        self.shared_expert = feed_forward(moe.activation, width, shared, **make) if shared else None
        self.shared_expert_gate = Linear(width, 1, **make) if shared and moe.shared_gate else None

    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        flat = x.reshape(-1, x.shape[-1])
        weights, experts = self._route(flat)
        inner = flat if self.latent_in is None else self.latent_in(flat)
        y = self._routed(inner, weights, experts)
        y = y if self.latent_out is None else self.latent_out(y)
        if self.shared_expert is not None:
            shared = self.shared_expert(flat)
            gate = self.shared_expert_gate
            y = y + (shared if gate is None else jax.nn.sigmoid(gate(flat)) * shared)
        return y.reshape(x.shape)

    def _route(self, x: Float[Array, "S M"]) -> tuple[Float[Array, "S k"], Int[Array, "S k"]]:
        """Weights (float32) and numbers of each token's experts."""
        moe = self.config
        if self.correction_bias is None:
            weights, experts = jax.lax.top_k(jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1), moe.top_k)
        else:
            # Computed in float32 whatever the model's dtype: rounded scores that are close choose other experts.
            kernel = self.router.kernel[...].astype(jnp.float32)
            scores = jax.nn.sigmoid(jnp.matmul(x.astype(jnp.float32), kernel, precision="highest"))
            _, experts = jax.lax.top_k(scores + self.correction_bias[...], moe.top_k)
            weights = jnp.take_along_axis(scores, experts, axis=-1)
        if moe.normalize_top_k:
            # The constant guards against scores that are all 0, which only a sigmoid gives.
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * moe.routed_scaling, experts

    def _routed(
        self, x: Float[Array, "S L"], weights: Float[Array, "S k"], experts: Int[Array, "S k"]
    ) -> Float[Array, "S L"]:
        """Dropless: token copies sorted by expert, one ragged product a projection.

        XLA computes ragged products densely on CPUs, every copy through every expert: fine for tests and small models
        there, not for large ones.
        """
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.config.num_experts)
        token = order // self.config.top_k
        out = jax.lax.ragged_dot(self._activated(x[token], sizes), self.down_proj[...], sizes)
        copies = out[jnp.argsort(order)].reshape(*weights.shape, -1)
        return jnp.einsum("skm,sk->sm", copies.astype(jnp.float32), weights).astype(x.dtype)

    def _activated(self, x: Float[Array, "C L"], sizes: Int[Array, " E"]) -> Float[Array, "C F"]:
        if self.gate_up_proj is None:
            assert self.up_proj is not None
            return _relu2(jax.lax.ragged_dot(x, self.up_proj[...], sizes))
        gate, up = jnp.split(jax.lax.ragged_dot(x, self.gate_up_proj[...], sizes), 2, axis=-1)
        return jax.nn.silu(gate) * up


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


def _expert_kernel(rngs: nnx.Rngs, experts: int, size_in: int, size_out: int, dtype: DTypeLike) -> nnx.Param:
    values = jax.random.normal(rngs.params(), (experts, size_in, size_out)) / math.sqrt(size_in)
    return nnx.Param(values.astype(dtype))
