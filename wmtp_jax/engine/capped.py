"""Rows of one batch that draft different numbers of tokens, and batches that draft none for a while."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from wmtp_jax.clp.adaptive import extended, step_with
from wmtp_jax.clp.drafter import HeadsDrafter
from wmtp_jax.decode.drafter import MTPDrafter, Proposing
from wmtp_jax.decode.loop import Stepped
from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import Committed, DecodeState
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


def can_rest(drafter: Capped) -> bool:
    """Whether steps without drafts are known for this drafter, and differ from those with."""
    return drafter.gamma > 0 and isinstance(drafter.drafter, MTPDrafter | HeadsDrafter)


@dataclass(frozen=True, kw_only=True)
class Resting:
    """Steps without drafts over the arrays of a drafter that goes on later, as if it had drafted wrongly all along."""

    drafter: Capped

    @property
    def gamma(self) -> int:
        return self.drafter.gamma

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> CappedDraft:
        return self.drafter.start(model, rows, capacity, dtype)

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> CappedDraft:
        return self.drafter.prefill(model, draft, hidden, next_tokens, start, prompt_length)

    def step(self, model: Decoder, state: DecodeState, sampling: Sampling, stops: Int[Array, "B E"]) -> Stepped:
        """Stores the entries of the last run and verifies nothing."""
        drafter, bare = self.drafter.drafter, replace(state, draft=state.draft.draft)
        run = state.committed
        lone = replace(bare, committed=Committed(run.hidden[:, :1], run.tokens[:, :1], run.count))
        # After a step without drafts there is one entry a row, and making room for more costs as much as making them.
        draft = jax.lax.cond(
            jnp.any(run.count > 1),
            lambda: extended(model, drafter, bare),
            lambda: extended(model, drafter, lone),
        )
        stepped = step_with(model, drafter, 0, sampling, stops, replace(bare, draft=draft))
        draft = replace(state.draft, draft=stepped.state.draft)
        return stepped._replace(state=replace(stepped.state, draft=draft))
