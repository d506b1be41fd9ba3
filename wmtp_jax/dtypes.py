"""The dtypes that weights can have here."""

import jax
import jax.numpy as jnp

from wmtp_jax.errors import UserError

DTYPES = ("float32", "bfloat16")


def parse_dtype(dtype: str | jnp.dtype | None, option: str = "dtype=") -> jnp.dtype:
    """A dtype of weights by name or as itself. Raises UserError, which begins with ``option``, for any other.

    None is bfloat16 on accelerators, and float32 on a CPU, whose bfloat16 products are several times slower.
    """
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise UserError(f"{option}{str(dtype) or repr('')}: must be one of {', '.join(DTYPES)}")
    return found
