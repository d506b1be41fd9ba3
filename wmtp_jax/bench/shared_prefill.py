"""One reading of the prompts for several drafters: in a long context the prompts are nearly all of the cost."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.decode.drafter import Drafter
from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class SharedPrefill:
    """A drafter that reads prompts as all of ``drafters`` would, side by side, and never drafts itself."""

    drafters: tuple[Drafter, ...]

    @property
    def gamma(self) -> int:
        return max(drafter.gamma for drafter in self.drafters)

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> tuple[Any, ...]:
        return tuple(drafter.start(model, rows, capacity, dtype) for drafter in self.drafters)

    def prefill(
        self,
        model: Decoder,
        draft: tuple[Any, ...],
        hidden: Float[Array, "B T M"],
        next_tokens: Int[Array, "B T"],
        start: Int[Array, " B"],
        prompt_length: Int[Array, " B"],
    ) -> tuple[Any, ...]:
        pairs = zip(self.drafters, draft, strict=True)
        return tuple(d.prefill(model, own, hidden, next_tokens, start, prompt_length) for d, own in pairs)

    def propose(self, model: Decoder, state: DecodeState, sampling: Sampling) -> tuple[Int[Array, "B gamma"], Any]:
        raise TypeError("this drafter only reads prompts: decode with one of its drafters and its `state_of`")

    def state_of(self, drafter: Drafter, state: DecodeState) -> DecodeState:
        """A copy of the state after the prompts, as if ``drafter`` alone had read them; the state may be used again."""
        run = drafter.gamma + 1
        read = state.committed
        own = replace(
            state,
            draft=state.draft[self.drafters.index(drafter)],
            committed=Committed(read.hidden[:, :run], read.tokens[:, :run], read.count),
        )
        return jax.tree.map(jnp.copy, own)
