"""Small pieces every block uses: norms, projections, rotary positions."""

import math
import os

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.config import RopeConfig, RopeScaling

_CORES = min(os.cpu_count() or 1, 8)


def rounds_one_vector_otherwise(dtype: DTypeLike) -> bool:
    """Whether a token alone can get other bits than beside another: XLA's CPU programs for one narrow vector differ.

    Seen in SmolLM2-135M, where two tokens, three and more agree to the bit. Other models can differ there too.
    """
    return jax.default_backend() == "cpu" and jnp.dtype(dtype) != jnp.float32


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32. Zero-centered norms (Qwen3.5, Qwen3-Next) scale by ``1 + weight``."""

    def __init__(self, size: int, eps: float, zero_centered: bool, dtype: DTypeLike):
        self.weight = nnx.Param((jnp.zeros if zero_centered else jnp.ones)(size, dtype))
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: Float[Array, "*S D"]) -> Float[Array, "*S D"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32)
        return (normed * (1.0 + weight if self.zero_centered else weight)).astype(x.dtype)


class Linear(nnx.Module):
    """``x @ kernel (+ bias)`` with kernel [in, out]: the layout that thin CPU products read fastest."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool = False, rngs: nnx.Rngs, dtype: DTypeLike):
        scale = 1.0 / math.sqrt(size_in)
        self.kernel = nnx.Param((scale * jax.random.normal(rngs.params(), (size_in, size_out))).astype(dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*S I"]) -> Float[Array, "*S O"]:
        y = product(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


def product(x: Float[Array, "*S I"], kernel: Float[Array, "I O"]) -> Float[Array, "*S O"]:
    """``x @ kernel`` in the dtype of x, in the way that reads the kernel fastest."""
    if jax.default_backend() != "cpu":
        return x @ kernel
    if x.dtype == jnp.float32:
        return _split_product(x, kernel) if x.size == kernel.shape[0] else x @ kernel
    return float32_product(x, kernel).astype(x.dtype)


def float32_product(x: Float[Array, "*S I"], kernel: Float[Array, "..."], axis: int = 0) -> Float[Array, "*S O"]:
    """x times a kernel, [I, O] or with ``axis=1`` [O, I], summed and returned in float32.

    XLA's CPU library has fast kernels of this form for bfloat16, from two vectors on, which give a vector the same
    result whatever is beside it; for any other form the whole kernel is converted to float32 first.
    """
    flat = x.reshape(-1, x.shape[-1])
    alone = len(flat) == 1 and x.dtype != jnp.float32 and jax.default_backend() == "cpu"
    taken = jnp.concatenate([flat, flat]) if alone else flat
    y = jax.lax.dot_general(taken, kernel, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
    return y[: len(flat)].reshape(*x.shape[:-1], -1)


def _split_product(x: Float[Array, "*S I"], kernel: Float[Array, "I O"]) -> Float[Array, "*S O"]:
    """One vector's product in parts that are summed: XLA reads a kernel of a megabyte on one core alone."""
    parts = math.gcd(kernel.shape[0], _CORES)
    pieces, kernels = x.reshape(parts, 1, -1), kernel.reshape(parts, -1, kernel.shape[1])
    return jnp.matmul(pieces, kernels).sum(axis=0).reshape(*x.shape[:-1], -1)


def rope_frequencies(config: RopeConfig) -> tuple[Float[Array, " R"], float]:
    """Inverse frequencies of the R = rotary_dim / 2 pairs, and the factor that multiplies sine and cosine."""
    pairs = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    plain = 1.0 / (config.theta**pairs)
    scaling = config.scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling), 1.0
    return _yarn_frequencies(config, plain, scaling)


def _llama3_frequencies(plain: Float[Array, " R"], scaling: RopeScaling) -> Float[Array, " R"]:
    """Llama 3.1: long wavelengths stretched, short ones kept, a linear ramp between."""
    turns = scaling.original_max_positions * plain / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = jnp.clip(ramp, 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / scaling.factor


def _yarn_frequencies(
    config: RopeConfig, plain: Float[Array, " R"], scaling: RopeScaling
) -> tuple[Float[Array, " R"], float]:
    """YaRN (arXiv 2309.00071, section 3.2 and 3.4): NTK-by-parts interpolation and the attention temperature."""

    def pair_with_turns(turns: float) -> float:
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = pair_with_turns(scaling.beta_fast), pair_with_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = jnp.clip((jnp.arange(plain.shape[0], dtype=jnp.float32) - low) / (high - low), 0.0, 1.0)
    frequencies = plain / scaling.factor * ramp + plain * (1 - ramp)
    return frequencies, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def apply_rope(
    x: Float[Array, "B T H D"], positions: Int[Array, "B T"], config: RopeConfig | None
) -> Float[Array, "B T H D"]:
    """Rotates pairs (j, j + rotary_dim/2) by position; dimensions past ``rotary_dim`` pass through. None: no change."""
    if config is None:
        return x
    frequencies, factor = rope_frequencies(config)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    half = config.rotary_dim // 2
    x32 = x.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def log_uniform_steps(rngs: nnx.Rngs, heads: int) -> Float[Array, " H"]:
    """Initial ``dt_bias``: the inverse softplus of step sizes spread log-uniformly over 0.001 to 0.1."""
    low, high = jnp.log(0.001), jnp.log(0.1)
    step = jnp.exp(low + (high - low) * jax.random.uniform(rngs.params(), (heads,)))
    return step + jnp.log(-jnp.expm1(-step))
