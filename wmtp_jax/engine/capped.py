"""Rows of one batch that draft different numbers of tokens."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from wmtp_jax.decode.drafter import Proposing
from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CappedDraft:
    """The inner drafter's arrays, and how many of its tokens each row takes to the verifier."""

    draft: Any
    most: Int[Array, " B"]


@dataclass(frozen=True, kw_only=True)
class Capped:
    """Another drafter whose tokens past a row's own limit are replaced by one that no target ever writes.

    The shapes stay those of the batch's largest gamma, so a lower one saves nothing: it is for requests that must not
    depend on drafts at all, and for comparing.
    """

    drafter: Proposing

    @property
    def gamma(self) -> int:
        return self.drafter.gamma

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> CappedDraft:
        return CappedDraft(self.drafter.start(model, rows, capacity, dtype), jnp.full(rows, self.gamma, jnp.int32))

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> CappedDraft:
        return replace(draft, draft=self.drafter.prefill(model, draft.draft, hidden, next_tokens, start, prompt_length))

    def propose(
        self, model: Decoder, state: DecodeState, sampling: Sampling
    ) -> tuple[Int[Array, "B gamma"], CappedDraft]:
        """As the inner drafter, with -1 past a row's limit."""
        tokens, draft = self.drafter.propose(model, replace(state, draft=state.draft.draft), sampling)
        allowed = jnp.arange(self.gamma) < state.draft.most[:, None]
        return jnp.where(allowed, tokens, -1), replace(state.draft, draft=draft)
