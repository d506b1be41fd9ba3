"""Mamba2 (arXiv 2405.21060): a short causal convolution, then a decaying sum of outer products."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.mamba2_ssd import mamba2_ssd
from wmtp_jax.config import ModelConfig
from wmtp_jax.models.layers import Linear, log_uniform_steps
from wmtp_jax.models.recurrent import RecurrentRun, RecurrentState, convolution_tail, convolve


class Mamba2(nnx.Module):
    """One Mamba2 block in the fused (Nemotron-H) layout: ``in_proj`` makes z, then x, B, C, then dt."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        m = config.mamba
        assert m is not None
        self.config = m
        self.eps = config.norm_eps
        projected = m.inner_size + m.conv_dim + m.num_heads
        self.in_proj = Linear(config.hidden_size, projected, bias=m.proj_bias, rngs=rngs, dtype=dtype)
        kernel = jax.random.normal(rngs.params(), (m.conv_kernel, m.conv_dim)) / m.conv_kernel**0.5
        self.conv_kernel = nnx.Param(kernel.astype(dtype))
        self.conv_bias = nnx.Param(jnp.zeros(m.conv_dim, dtype)) if m.conv_bias else None
        self.A_log = nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (m.num_heads,), minval=1.0, maxval=16.0)))
        self.D = nnx.Param(jnp.ones(m.num_heads))
        self.dt_bias = nnx.Param(log_uniform_steps(rngs, m.num_heads))
        self.norm_weight = nnx.Param(jnp.ones(m.inner_size, dtype))
        self.out_proj = Linear(m.inner_size, config.hidden_size, bias=m.proj_bias, rngs=rngs, dtype=dtype)

    def initial_state(self, rows: int) -> RecurrentState:
        """The state before any token: all zero."""
        m = self.config
        return RecurrentState(
            jnp.zeros((rows, m.num_heads, m.state_size, m.head_dim), jnp.float32),
            jnp.zeros((rows, m.conv_kernel - 1, m.conv_dim), self.conv_kernel.dtype),
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
        m, (rows, tokens) = self.config, x.shape[:2]
        z, mixed, dt = jnp.split(self.in_proj(x), [m.inner_size, m.inner_size + m.conv_dim], axis=-1)
        conv_inputs = jnp.concatenate([state.tail, mixed.astype(state.tail.dtype)], axis=1)
        bias = None if self.conv_bias is None else self.conv_bias[...]
        parts = jnp.split(
            convolve(conv_inputs, self.conv_kernel[...], bias),
            [m.inner_size, m.inner_size + m.num_groups * m.state_size],
            axis=-1,
        )
        inputs = parts[0].reshape(rows, tokens, m.num_heads, m.head_dim)
        b, c = (part.reshape(rows, tokens, m.num_groups, m.state_size) for part in parts[1:])
        step = self._step(dt)
        if valid is not None:
            step = jnp.where((jnp.arange(tokens) < valid[:, None])[..., None], step, 0.0)
        log_decay = -jnp.exp(self.A_log[...].astype(jnp.float32)) * step
        out, memory, replay = mamba2_ssd(
            inputs * step[..., None], b, c, log_decay, state.memory, implementation=kernels
        )
        out = out + self.D[...].astype(jnp.float32)[:, None] * inputs
        y = self.out_proj(self._gated_norm(out.reshape(rows, tokens, -1), z).astype(x.dtype))
        if valid is None:
            return y, RecurrentRun(replay, conv_inputs)
        return y, RecurrentState(memory, convolution_tail(conv_inputs, valid, m.conv_kernel - 1))

    def _step(self, dt: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """Step sizes. A lower bound, where there is one, must hold in prefill and decoding alike: see ``min_step``.

        Hugging Face bounds steps by ``time_step_min`` in prefill alone, so that its text depends on how it was read;
        the engines that the checkpoints are served with bound none. Conversion therefore sets no bound.
        """
        step = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        return jnp.maximum(step, self.config.min_step) if self.config.min_step else step

    def _gated_norm(self, y: Float[Array, "B T I"], z: Float[Array, "B T I"]) -> Float[Array, "B T I"]:
        """Gate before norm, the norm over each group of heads; the opposite order of Gated DeltaNet. Float32."""
        y = y * jax.nn.silu(z.astype(jnp.float32))
        grouped = y.reshape(*y.shape[:-1], self.config.num_groups, -1)
        scale = jax.lax.rsqrt(jnp.mean(grouped * grouped, axis=-1, keepdims=True) + self.eps)
        return (grouped * scale).reshape(y.shape) * self.norm_weight[...].astype(jnp.float32)
