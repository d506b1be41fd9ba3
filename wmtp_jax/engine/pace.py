"""Whether a batch should draft, by what its steps cost on this machine and how many drafts are right.

A step that verifies drafts computes more than one that does not. A lone row leaves the machine idle enough for that to
be nearly free; many rows do not. So each size of batch has costs of its own, and they are measured on the steps that
are taken anyway.
"""

import statistics
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

# The last so many calls tell what a step costs; one that the machine held up among them changes nothing.
_REMEMBERED = 5
# Before so many, the ways take turns.
_ENOUGH = 3
# So often the way that seems to be slower is taken, to notice when it is not.
_RETRY = 32
# Of the running mean: about the last fifty calls count.
_DECAY = 0.98


class Kind(NamedTuple):
    """Batches that one program serves: ``plain`` ones sample greedily, all of their rows."""

    bucket: int
    plain: bool


@dataclass
class Pace:
    """Chooses between drafting and not; told what came of it."""

    _costs: dict[tuple[Kind, bool], deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_REMEMBERED))
    )
    _calls: dict[Kind, int] = field(default_factory=lambda: defaultdict(int))
    _seen: set[tuple[Kind, bool]] = field(default_factory=set)
    _tokens: float = 0.0
    _row_steps: float = 0.0

    def drafts(self, kind: Kind) -> bool:
        """Whether the next steps of such a batch should draft."""
        drafting, resting = self._costs[kind, True], self._costs[kind, False]
        if min(len(drafting), len(resting)) < _ENOUGH:
            return len(drafting) <= len(resting)
        pays = self.tokens_a_step * statistics.median(resting) >= statistics.median(drafting)
        self._calls[kind] += 1
        return pays != (self._calls[kind] % _RETRY == 0)

    @property
    def tokens_a_step(self) -> float:
        """What a row's step with drafts emits, of late."""
        return self._tokens / self._row_steps if self._row_steps else 1.0

    def took(self, kind: Kind, *, drafting: bool, seconds: float, steps: int, tokens: int, row_steps: int) -> None:
        """Takes in a call of the loop: ``steps`` of the batch, which are ``row_steps`` over its rows."""
        way = kind, drafting
        if drafting:
            self._tokens = _DECAY * self._tokens + tokens
            self._row_steps = _DECAY * self._row_steps + row_steps
        # A program's first call may compile it.
        if way in self._seen and steps:
            self._costs[way].append(seconds / steps)
        self._seen.add(way)
