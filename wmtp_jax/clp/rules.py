"""How many of the heads' tokens a step takes without asking the backbone."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from wmtp_jax.clp.heads import Heads, features

Rule = Literal["clp", "gate", "threshold", "all"]


def span(
    rule: Rule, tau: float, heads: Heads, hidden: Float[Array, "B M"], logits: Float[Array, "B k V"]
) -> Int[Array, " B"]:
    """Tokens to take, 0 .. k.

    - ``clp``: the likeliest length; 0 where its probability is below ``tau`` (CLP, section 3).
    - ``gate``: heads up to the first whose gate gives it less than ``tau``.
    - ``threshold``: heads up to the first whose best token is less likely than ``tau``.
    - ``all``: all of them.
    """
    k = logits.shape[1]
    if rule == "all":
        return jnp.full(len(logits), k, jnp.int32)
    if rule == "clp":
        chances = heads.lengths(hidden)
        taken = jnp.where(chances.max(axis=-1) < tau, 0, chances.argmax(axis=-1))
        return jnp.minimum(taken, k).astype(jnp.int32)
    own = features(logits)
    chance = jax.nn.sigmoid(heads.gate(own)) if rule == "gate" else own[..., 0]
    return jnp.cumprod(chance >= tau, axis=1).sum(axis=1).astype(jnp.int32)
