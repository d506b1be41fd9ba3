"""A drafter that knows the text, and is wrong where it is told to be."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class TextDrafter:
    """Drafts from one row's full ``text``; every ``wrong_every``-th position is wrong (0: none).

    What it drafts is data, not part of what the program is compiled for.
    """

    gamma: int
    text: tuple[int, ...] = field(compare=False)
    wrong_every: int = field(default=0, compare=False)

    def start(self, model: Decoder, rows: int, capacity: int, dtype: jnp.dtype) -> jax.Array:
        table = np.full(1024, 3, np.int32)
        table[: len(self.text)] = self.text
        if self.wrong_every:
            table[:: self.wrong_every] ^= 1
        return jax.device_put(table)

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> jax.Array:
        return draft

    def propose(self, model: Decoder, state: DecodeState, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
        positions = state.length[:, None] + 1 + jnp.arange(self.gamma)
        return state.draft[positions], state.draft
