"""A drafter that knows the text, and is wrong where it is told to be."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class TextDrafter:
    """Drafts from one row's full ``text``; every ``wrong_every``-th position is wrong (0: none).

    The text is data, not part of what the program is compiled for.
    """

    gamma: int
    text: tuple[int, ...] = field(compare=False)
    wrong_every: int = 0

    def start(self, model: Decoder, rows: int, capacity: int, dtype: jnp.dtype) -> jax.Array:
        padded = (*self.text, *([3] * (1024 - len(self.text))))
        return jnp.asarray(padded, jnp.int32)

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> jax.Array:
        return draft

    def propose(self, model: Decoder, state: DecodeState, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
        positions = state.length[:, None] + 1 + jnp.arange(self.gamma)
        tokens = state.draft[positions]
        if self.wrong_every:
            tokens = jnp.where(positions % self.wrong_every == 0, tokens ^ 1, tokens)
        return tokens, state.draft
