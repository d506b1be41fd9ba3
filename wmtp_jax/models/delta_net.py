"""Gated DeltaNet: a short causal convolution, then the gated delta rule."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.gated_delta_rule import gated_delta_rule
from wmtp_jax.config import ModelConfig
from wmtp_jax.models.layers import Linear, RMSNorm, log_uniform_steps
from wmtp_jax.models.recurrent import RecurrentRun, RecurrentState, convolution_tail, convolve


class DeltaNet(nnx.Module):
    """One gated-delta-rule block, in the unfused (Qwen3.5) parameter layout."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        d = config.delta
        assert d is not None
        self.config = d
        value_size = d.num_value_heads * d.value_dim
        make: dict[str, Any] = dict(rngs=rngs, dtype=dtype)
        self.in_proj_qkv = Linear(config.hidden_size, d.conv_dim, **make)
        self.in_proj_z = Linear(config.hidden_size, value_size, **make)
        self.in_proj_b = Linear(config.hidden_size, d.num_value_heads, **make)
        self.in_proj_a = Linear(config.hidden_size, d.num_value_heads, **make)
        kernel = jax.random.normal(rngs.params(), (d.conv_kernel, d.conv_dim)) / d.conv_kernel**0.5
        self.conv_kernel = nnx.Param(kernel.astype(dtype))
        self.A_log = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), (d.num_value_heads,), minval=1.0, maxval=16.0))
        )
        self.dt_bias = nnx.Param(log_uniform_steps(rngs, d.num_value_heads))
        self.norm = RMSNorm(d.value_dim, config.norm_eps, False, dtype)
        self.out_proj = Linear(value_size, config.hidden_size, **make)

    def initial_state(self, rows: int) -> RecurrentState:
        """The state before any token: all zero."""
        d = self.config
        return RecurrentState(
            jnp.zeros((rows, d.num_value_heads, d.key_dim, d.value_dim), jnp.float32),
            jnp.zeros((rows, d.conv_kernel - 1, d.conv_dim), self.conv_kernel.dtype),
        )

    def __call__(
        self,
        x: Float[Array, "B T M"],
        state: RecurrentState,
        valid: Int[Array, " B"] | None,
        kernels: str | None = None,
    ) -> tuple[Float[Array, "B T M"], RecurrentState | RecurrentRun]:
        """Mixes T tokens after ``state``.

        With ``valid`` (tokens that count, a row) the new state after them is returned; with None the run is left
        uncommitted and comes back as a ``RecurrentRun``.
        """
        conv_inputs = jnp.concatenate([state.tail, self.in_proj_qkv(x).astype(state.tail.dtype)], axis=1)
        q, k, v = self._split_heads(convolve(conv_inputs, self.conv_kernel[...], None))
        beta = jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32))
        step = jax.nn.softplus(self.in_proj_a(x).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        log_decay = -jnp.exp(self.A_log[...].astype(jnp.float32)) * step
        if valid is not None:
            counts = (jnp.arange(x.shape[1]) < valid[:, None])[..., None]
            beta, log_decay = jnp.where(counts, beta, 0.0), jnp.where(counts, log_decay, 0.0)
        out, memory, replay = gated_delta_rule(q, k, v, log_decay, beta, state.memory, implementation=kernels)
        y = self._gate(out, x)
        if valid is None:
            return y, RecurrentRun(replay, conv_inputs)
        return y, RecurrentState(memory, convolution_tail(conv_inputs, valid, state.tail.shape[1]))

    def _split_heads(self, mixed: Float[Array, "B T C"]) -> tuple[Array, Array, Array]:
        """Unit-length queries (scaled by dk^-1/2) and keys, and values, all with one head a value head."""
        d = self.config
        key_size = d.num_key_heads * d.key_dim
        q, k, v = jnp.split(mixed, [key_size, 2 * key_size], axis=-1)
        q, k = (_unit_length(y.reshape(*y.shape[:2], d.num_key_heads, d.key_dim)) for y in (q, k))
        repeats = d.num_value_heads // d.num_key_heads
        q, k = (jnp.repeat(y, repeats, axis=2) for y in (q * d.key_dim**-0.5, k))
        return q, k, v.reshape(*v.shape[:2], d.num_value_heads, d.value_dim)

    def _gate(self, out: Float[Array, "B T H dv"], x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Norm before gate, per head; the opposite order of Mamba2."""
        z = self.in_proj_z(x).reshape(out.shape)
        y = self.norm(out.astype(x.dtype)) * jax.nn.silu(z.astype(jnp.float32)).astype(x.dtype)
        return self.out_proj(y.reshape(*y.shape[:2], -1))


def _unit_length(x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
