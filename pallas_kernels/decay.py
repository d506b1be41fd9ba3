"""Sums of log decay inside a chunk of tokens, without the rounding of their differences."""

import jax.numpy as jnp
from jaxtyping import Array, Float

_STEPS = 256.0


def running(log_decay: Float[Array, "*B C"]) -> tuple[Float[Array, "*B C"], Float[Array, "*B C"]]:
    """The sum G up to every token as a coarse and a fine part.

    A difference of float32 sums has only the digits of the sums, and strong decay leaves few. The coarse parts are
    multiples of 1/256, whose sums and differences are exact up to 65536; the fine ones are too small to round.
    """
    coarse = jnp.round(log_decay * _STEPS) / _STEPS
    upto = jnp.triu(jnp.ones((log_decay.shape[-1],) * 2))
    # Summed by a product with ones: a single operation where XLA spells a cumulative sum out in many.
    coarse, fine = jnp.stack([coarse, log_decay - coarse]) @ upto
    return coarse, fine


def weights(log_decay: Float[Array, "*B C"]) -> tuple[Float[Array, "*B C C"], Float[Array, "*B C"]]:
    """What is left of token j at token i, exp(G_i - G_j) where j <= i and else 0; and exp(G_i).

    Outside, the exponent is replaced before exp: an infinity that is masked afterwards still turns gradients into NaN.
    """
    coarse, fine = running(log_decay)
    exponent = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    lower = jnp.tril(jnp.ones(exponent.shape[-2:], bool))
    return jnp.exp(jnp.where(lower, exponent, -jnp.inf)), jnp.exp(coarse + fine)
