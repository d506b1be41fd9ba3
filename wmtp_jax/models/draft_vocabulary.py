"""The tokens that drafts are chosen from, where they are fewer than the target's (FastMTP, arXiv 2509.18362).

A draft reads the output head once a token; reading the rows of frequent tokens alone costs a part of that, and a token
that cannot be drafted is only never accepted.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from wmtp_jax.models.layers import float32_product

# A finite stand-in for minus infinity, so that entropies of such logits are finite.
NEVER = -1e30


class DraftVocabulary(nnx.Module):
    """U token ids in rising order, and their rows of the output head, or with ``axis=0`` their columns [M, U]."""

    def __init__(self, ids: Int[Array, " U"], kernel: Float[Array, "..."], vocab_size: int, axis: int = 1):
        self.ids = nnx.Variable(ids)
        self.kernel = nnx.Variable(kernel)
        self.vocab_size = vocab_size
        self.axis = axis

    @property
    def is_whole(self) -> bool:
        """Whether these are all tokens."""
        return self.ids.shape[0] == self.vocab_size

    def logits(self, hidden: Float[Array, "*S M"]) -> Float[Array, "*S U"]:
        """Float32 logits of these tokens."""
        return float32_product(hidden, self.kernel[...], axis=self.axis)

    def spread(self, logits: Float[Array, "*S U"]) -> Float[Array, "*S V"]:
        """Logits over all tokens; those that are not among these get ``NEVER``."""
        if self.is_whole:
            return logits
        everywhere = jnp.full((*logits.shape[:-1], self.vocab_size), NEVER)
        return everywhere.at[..., self.ids[...]].set(logits)
