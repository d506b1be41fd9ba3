"""``gamma="auto"``: every step drafts as many tokens as pay, and the target verifies them, so the text is unchanged.

The length predictor, or the acceptance seen so far where there is none, says how many drafts are likely to be right;
a table measured on this machine says what a step with each number of them costs. A step with g drafts is worth its
expected tokens less what its time would bring at the rate of late: maximizing that is what maximizes tokens over time
in the long run (renewal reward; Dinkelbach's method), which the largest ratio of a single step does not.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from wmtp_jax.clp.drafter import HeadsDrafter, newest_hidden
from wmtp_jax.decode.drafter import MTPDrafter, Proposing, draft_decode, draft_extend
from wmtp_jax.decode.loop import Stepped, commit, verify
from wmtp_jax.decode.sampling import Sampling
from wmtp_jax.decode.state import Committed, DecodeState
from wmtp_jax.models.decoder import Decoder

# Of the running averages: about the last hundred steps count.
_DECAY = 0.99
# A draft that is not made teaches nothing: so often one more is made than pays, to notice when it pays again.
_RETRY = 32
# Without a predictor every draft is expected to be right half the time where the one before was.
_UNKNOWN = 0.5
# Right drafts that were expected, and came, before the first step: what is seen outweighs them soon.
_PRIOR = 1.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pace:
    """What is known of speed: ``costs[g]`` milliseconds of a step with g drafts; and running averages.

    ``tokens`` and ``spent`` (ms) are those of a step. Of steps with more than j drafts, ``right[j]`` counts those in
    which draft j + 1 and all before it were right, and ``foreseen[j]`` is how many were expected. ``forced`` is the
    number of drafts of every step, -1 to choose. ``steps`` counts steps.
    """

    costs: Float[Array, " N"]
    tokens: Float[Array, ""]
    spent: Float[Array, ""]
    right: Float[Array, " gamma"]
    foreseen: Float[Array, " gamma"]
    forced: Int[Array, ""]
    steps: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paced:
    """The inner drafter's arrays, and the pace."""

    draft: Any
    pace: Pace


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Up to ``gamma`` of the inner drafter's tokens a step; how many is decided anew every step, for a batch together.

    Rows of a batch share one forward pass, whose cost is that of its longest row: drafting fewer for one row would save
    nothing, so the number that is best for their sum is taken.
    """

    drafter: Proposing

    @property
    def gamma(self) -> int:
        return self.drafter.gamma

    def start(self, model: Decoder, rows: int, capacity: int, dtype: DTypeLike) -> Paced:
        count = self.gamma
        pace = Pace(
            costs=1.0 + 0.1 * jnp.arange(count + 1, dtype=jnp.float32),
            tokens=jnp.float32(1.0),
            spent=jnp.float32(1.0),
            right=jnp.full(count, _PRIOR, jnp.float32),
            foreseen=jnp.full(count, _PRIOR, jnp.float32),
            forced=jnp.int32(-1),
            steps=jnp.int32(0),
        )
        return Paced(self.drafter.start(model, rows, capacity, dtype), pace)

    def prefill(self, model, draft, hidden, next_tokens, start, prompt_length) -> Paced:
        return replace(draft, draft=self.drafter.prefill(model, draft.draft, hidden, next_tokens, start, prompt_length))

    def step(self, model: Decoder, state: DecodeState, sampling: Sampling, stops: Int[Array, "B E"]) -> Stepped:
        """One step with 0 to ``gamma`` drafts; each number is a branch with a shape of its own."""
        pace, inner = state.draft.pace, replace(state, draft=state.draft.draft)
        inner = replace(inner, draft=extended(model, self.drafter, inner))
        expected = foreseen(model, state, self.gamma)
        count = choose_count(state, pace, expected)
        branches = [
            partial(step_with, model, self.drafter, number, sampling, stops) for number in range(self.gamma + 1)
        ]
        stepped = jax.lax.switch(count, branches, inner)
        pace = updated(pace, count, stepped.count, ~state.done, expected)
        return stepped._replace(state=replace(stepped.state, draft=Paced(stepped.state.draft, pace)))


def extended(model: Decoder, drafter: Proposing, state: DecodeState) -> Any:
    """The drafter's arrays with the entries of the last run.

    Whatever is drafted: an entry that is not stored now would be missing later.
    """
    return draft_extend(model, state) if isinstance(drafter, MTPDrafter) else state.draft


def foreseen(model: Decoder, state: DecodeState, gamma: int) -> Float[Array, "B gamma"]:
    """The probability that draft j + 1 and all before it will be right, as the length predictor sees it."""
    if model.heads is None:
        return jnp.broadcast_to(_UNKNOWN ** jnp.arange(1.0, gamma + 1), (len(state.pending), gamma))
    lengths = model.heads.lengths(newest_hidden(state))
    return jnp.cumsum(lengths[:, ::-1], axis=1)[:, ::-1][:, 1 : gamma + 1]


def survival(pace: Pace, expected: Float[Array, "B gamma"]) -> Float[Array, "B gamma"]:
    """The same, corrected by how often it came true of late: text is easier or harder than a predictor was taught."""
    corrected = jnp.minimum(expected * pace.right / pace.foreseen, 1.0)
    # More drafts in a row are never likelier to be right than fewer, however little is known of them.
    return jax.lax.cummin(corrected, axis=1)


def choose_count(state: DecodeState, pace: Pace, expected: Float[Array, "B gamma"]) -> Int[Array, ""]:
    """How many drafts this step should have."""
    likely = jnp.where(state.done[:, None], 0.0, survival(pace, expected)).sum(axis=0)
    gained = jnp.concatenate([jnp.zeros(1), jnp.cumsum(likely)])
    # Plain tokens, one a row, come with every choice.
    rate = pace.tokens / pace.spent
    best = jnp.argmax(gained - rate * pace.costs)
    again = pace.steps % _RETRY == _RETRY - 1
    best = jnp.where(again, jnp.minimum(best + 1, len(pace.right)), best)
    return jnp.where(pace.forced >= 0, pace.forced, best).astype(jnp.int32)


def step_with(
    model: Decoder, drafter: Proposing, number: int, sampling: Sampling, stops: Int[Array, "B E"], state: DecodeState
) -> Stepped:
    """A step with ``number`` drafts after ``extended``; what it returns has the shape of one with ``drafter.gamma``."""
    drafts, draft = _drafts(model, drafter, number, state, sampling)
    verified = verify(model, state, drafts, sampling)
    new, count = commit(state, drafts, draft, verified, stops)

    def padded(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, drafter.gamma - number), *[(0, 0)] * (x.ndim - 2)))

    committed = Committed(padded(new.committed.hidden), padded(new.committed.tokens), count)
    likely = None if verified.likely is None else jax.tree.map(padded, verified.likely)
    return Stepped(replace(new, committed=committed), committed.tokens, count, likely)


def _drafts(
    model: Decoder, drafter: Proposing, number: int, state: DecodeState, sampling: Sampling
) -> tuple[Int[Array, "B g"], Any]:
    if not number:
        return jnp.zeros((len(state.pending), 0), jnp.int32), state.draft
    if isinstance(drafter, HeadsDrafter):
        return HeadsDrafter(gamma=number).propose(model, state, sampling)
    tokens, _, ring = draft_decode(model, state, state.draft, number, sampling)
    return tokens, ring


def updated(
    pace: Pace, count: Int[Array, ""], emitted: Int[Array, " B"], live: Array, expected: Float[Array, "B gamma"]
) -> Pace:
    """The pace after a step with ``count`` drafts that emitted so many tokens a row."""
    numbers = jnp.arange(len(pace.right))
    tried = live[:, None] & (numbers < count)
    right = tried & (emitted[:, None] - 1 > numbers)
    # Positions that were not tried keep what is known of them.
    fade = jnp.where(jnp.any(tried, axis=0), _DECAY, 1.0)
    return replace(
        pace,
        tokens=_DECAY * pace.tokens + emitted.sum(),
        spent=_DECAY * pace.spent + pace.costs[count],
        right=fade * pace.right + right.sum(axis=0),
        foreseen=fade * pace.foreseen + jnp.where(tried, expected, 0.0).sum(axis=0),
        steps=pace.steps + 1,
    )


def with_costs(state: DecodeState, costs: Float[Array, " N"], forced: int = -1) -> DecodeState:
    """The state with measured step costs (ms), its rate started anew from that of plain steps."""
    pace = state.draft.pace
    pace = replace(
        pace,
        costs=jnp.asarray(costs, jnp.float32),
        tokens=jnp.float32(len(state.pending)),
        spent=jnp.float32(costs[0]),
        forced=jnp.int32(forced),
    )
    return replace(state, draft=replace(state.draft, pace=pace))
