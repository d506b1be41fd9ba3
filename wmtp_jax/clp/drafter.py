"""Heads on a hidden state as a drafter: verified, they change the speed and never the text."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.clp.heads import Heads
from wmtp_jax.decode.drafter import MTPDrafter, Proposing, draft_run
from wmtp_jax.decode.sampling import Sampling, choose
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class HeadsDrafter:
    """The first ``gamma`` parallel or residual heads; they have no cache, so nothing is to be kept."""

    gamma: int

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> None:
        """Checks that there are enough heads."""
        heads = model.heads
        if heads is None or heads.config.is_mtp or self.gamma > heads.config.drafts:
            has = "no heads" if heads is None else f"{heads.config.kind} heads for {heads.config.drafts}"
            raise UserError(f"gamma={self.gamma} needs parallel or residual heads for as many; this model has {has}")

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> None:
        return None

    def propose(self, model: Decoder, state: DecodeState, sampling: Sampling) -> tuple[Int[Array, "B gamma"], None]:
        """One token a head, all from the newest hidden state."""
        return self.run(model, state, sampling)[0], None

    def run(
        self, model: Decoder, state: DecodeState, sampling: Sampling
    ) -> tuple[Int[Array, "B gamma"], Float[Array, "B gamma V"]]:
        """The same, with the logits that they were chosen from."""
        heads, vocabulary = model.heads, model.draft_vocabulary
        assert isinstance(heads, Heads)
        assert vocabulary is not None
        # Competing heads begin one token earlier, at the one that the backbone has already written.
        skipped = 2 - heads.config.offset
        hidden = newest_hidden(state)
        logits = [vocabulary.spread(own) for own in heads.logits(vocabulary, hidden)[skipped : skipped + self.gamma]]
        tokens, history = [], state.history
        for index, own in enumerate(logits):
            tokens.append(choose(sampling, own, state.length + 1 + index, history))
            if history is not None:
                history = history.add(tokens[-1][:, None], jnp.ones_like(tokens[-1][:, None], bool))
        return jnp.stack(tokens, axis=1), jnp.stack(logits, axis=1)


def newest_hidden(state: DecodeState) -> Float[Array, "B M"]:
    """The target's normed hidden state at the last committed position of every row."""
    newest = jnp.maximum(state.committed.count - 1, 0)[:, None, None]
    return jnp.take_along_axis(state.committed.hidden, newest, axis=1)[:, 0]


def drafted(
    model: Decoder, drafter: Proposing, state: DecodeState, sampling: Sampling
) -> tuple[Int[Array, "B gamma"], Float[Array, "B gamma V"], Any]:
    """What a drafter of either kind proposes, its logits, and its new arrays."""
    if isinstance(drafter, HeadsDrafter):
        return *drafter.run(model, state, sampling), None
    assert isinstance(drafter, MTPDrafter)
    return draft_run(model, state, drafter.gamma, sampling)


def heads_drafter(model: Decoder, gamma: int, window: int, sink: int) -> Proposing:
    """The drafter that a model's heads make. Raises UserError for more tokens than there are heads."""
    config = model.heads.config
    if gamma > config.drafts and not config.is_mtp:
        raise UserError(f"gamma={gamma}: these heads write {config.drafts} tokens after the backbone's; give fewer")
    return MTPDrafter(gamma=gamma, window=window, sink=sink) if config.is_mtp else HeadsDrafter(gamma=gamma)
