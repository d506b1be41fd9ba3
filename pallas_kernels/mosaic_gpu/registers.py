"""Small pieces of a Mosaic GPU kernel, and the names that differ between JAX versions."""

import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

# Layouts are written out: the other semantics infers them, differently in each version of JAX. The only approximate
# function in use is the hardware's exp2, whose relative error stays under 2^-22.
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True)

# Until JAX 0.11 the index was an argument of its own.
_WHOLE = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def load(ref, layout, *, optimized: bool = True) -> jax.Array:
    """The whole of ``ref`` in registers, in this layout. What is not in shared memory cannot be ``optimized``."""
    return plgpu.load(ref, *_WHOLE, layout=layout, optimized=optimized)


def transpose(ref):
    """The same memory with its two axes exchanged."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def bfloat16_parts(x: Float[Array, "*S"]) -> list[Float[Array, "*S"]]:
    """Three bfloat16 arrays whose sum is exactly the float32 ``x``: eight significant bits each.

    Cut off by their bits rather than by a conversion and back, which compilers take for the identity.
    """
    high = _upper_bits(x)
    middle = _upper_bits(x - high)
    return [part.astype(jnp.bfloat16) for part in (high, middle, x - high - middle)]


def _upper_bits(x):
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536), jnp.float32)
