"""Everything one decoding batch carries from step to step."""

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from wmtp_jax.cache.paged import PagedCache
from wmtp_jax.decode.sampling import History
from wmtp_jax.models.recurrent import RecurrentState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Committed:
    """What the last verified run added, a row: the first ``count`` entries are real.

    Entry j pairs the target's normed hidden state at position ``length - count + j`` with the token that follows it;
    the last of them pairs with the pending token.
    """

    hidden: Float[Array, "B N M"]
    tokens: Int[Array, "B N"]
    count: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """``length`` tokens are in every cache; ``pending`` is emitted but not yet consumed.

    ``draft`` belongs to the drafter. ``remaining`` counts tokens that may still be emitted; ``done`` rows change no
    more.
    """

    cache: PagedCache
    recurrent: tuple[RecurrentState, ...]
    draft: Any
    length: Int[Array, " B"]
    pending: Int[Array, " B"]
    committed: Committed
    remaining: Int[Array, " B"]
    done: Bool[Array, " B"]
    history: History | None
