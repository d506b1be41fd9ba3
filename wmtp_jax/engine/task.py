"""One request on its way through the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from wmtp_jax.decode.sampling import Likely
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.engine.prefixes import Key
from wmtp_jax.generation.options import GenerateOptions
from wmtp_jax.generation.rows import Event, Row, TokenLogprobs
from wmtp_jax.text.constraints import Matcher

# Gets every event of a request, and None with the error that ended it in place of a last event.
Listener = Callable[[Event | None, Exception | None], None]


class Gained(NamedTuple):
    """What one row emitted; ``likely`` has no axis of rows."""

    tokens: list[int]
    drafted: list[bool]
    likely: Likely | None = None


@dataclass(eq=False)
class Task:
    """Waiting where it has no ``slot``; reading while ``read`` is short of ``to_read``; then decoding.

    A task that gives its slot up for an older one waits again, and reads what it has emitted with its prompt.
    """

    prompt: list[int]
    options: GenerateOptions
    sampling: SamplingParams
    gamma: int
    # Positions that it can come to occupy, drafts past its end included.
    need: int
    row: Row
    listener: Listener
    # How many of the likeliest tokens to tell of at each position; None tells nothing.
    logprobs: int | None = None
    matcher: Matcher | None = None
    # Given as it joins the queue; the lower, the older.
    arrival: int = 0
    to_read: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    read: int = 0
    reading: bool = False
    # Prompt tokens that an earlier request had read; None before the first slot.
    reused: int | None = None

    @property
    def emitted(self) -> list[int]:
        """All tokens so far; the last of them is not yet in any cache."""
        return self.row.tokens

    @property
    def known(self) -> int | None:
        """The token after ``to_read`` where an earlier turn has emitted it."""
        return self.emitted[-1] if self.emitted else None

    @property
    def length(self) -> int:
        """Tokens in the caches of a task that decodes."""
        return len(self.prompt) + len(self.emitted) - 1

    @property
    def plain(self) -> bool:
        """Whether its tokens are the target's argmax, and nobody asks how likely they were."""
        params = self.sampling
        return not (params.temperature or params.penalizes or self.matcher) and self.logprobs is None

    def take(self, gained: Gained) -> None:
        """Hands over what was emitted. Raises GrammarFailed where the constraint cannot go on from there."""
        event = self.row.take(gained.tokens)
        taken = len(event.tokens)
        event = replace(event, drafted=gained.drafted[:taken])
        if self.logprobs is not None and gained.likely is not None:
            event = replace(event, logprobs=_logprobs(gained.likely, taken, self.logprobs))
        if self.matcher is not None and event.finished is None:
            self.matcher.advance(event.tokens)
        self.listener(event, None)


def _logprobs(likely: Likely, count: int, most: int) -> list[TokenLogprobs]:
    chosen, ids, values = (part[:count].tolist() for part in likely)
    return [
        TokenLogprobs(logprob, list(zip(row[:most], tops[:most], strict=True)))
        for logprob, row, tops in zip(chosen, ids, values, strict=True)
    ]
