"""Narrow floats as whole numbers, where XLA would widen whole arrays of them.

XLA's CPU backend has no slices, scatters or gathers of bfloat16 and of eight-bit floats: it converts the array that
they work on to float32, however large, and back. Of whole numbers of the same size it moves the entries alone. So
caches of such floats are carried as bit patterns on CPUs, and only what has been cut out of them becomes floats again.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16, jnp.dtype(jnp.float8_e4m3fn): jnp.uint8}
_FLOATS = {jnp.dtype(bits): floats for floats, bits in _BITS.items()}


def as_bits(array: Array) -> Array:
    """The array as it is carried: on CPUs bit patterns in place of bfloat16 and float8_e4m3fn, else itself."""
    bits = _BITS.get(array.dtype) if jax.default_backend() == "cpu" else None
    return array if bits is None else jax.lax.bitcast_convert_type(array, bits)


def as_floats(array: Array) -> Array:
    """The inverse of ``as_bits``. XLA cancels pairs of the two; alone, each copies the array."""
    floats = _FLOATS.get(array.dtype)
    return array if floats is None else jax.lax.bitcast_convert_type(array, floats)


def float_dtype(array: Array) -> jnp.dtype:
    """The dtype of what ``as_floats`` gives."""
    return jnp.dtype(_FLOATS.get(array.dtype, array.dtype))


def take_rows(array: Float[Array, "R M"], numbers: Int[Array, "*B"]) -> Float[Array, "*B M"]:
    """``array[numbers]``."""
    if jax.default_backend() == "cpu" and array.dtype in _BITS:
        # Otherwise the conversion of the whole array is moved out of the loop that takes a few rows at a time.
        array, numbers = jax.lax.optimization_barrier((array, numbers))
    return array[numbers]
