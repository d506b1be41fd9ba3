"""One text on its way: its events as they come, and what they add up to."""

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import numpy as np

from wmtp_jax.engine.engine import Running
from wmtp_jax.generation.rows import Event, TokenLogprobs
from wmtp_jax.generation.stats import acceptance_by_position, acceptance_length
from wmtp_jax.serve.answers import Drafts, FinishReason


@dataclass(eq=False)
class Choice:
    """``index`` is its place in the answer, ``prompt`` that of its prompt among the request's.

    ``arrived`` is when the request came, in seconds of the monotonic clock.
    """

    index: int
    running: Running
    prompt: int
    gamma: int
    arrived: float
    events: list[Event] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""

    def take(self, event: Event) -> None:
        """Appends an event."""
        self.events.append(event)
        self.times.append(time.monotonic())
        self.text += event.text

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

    @property
    def finish_reason(self) -> FinishReason:
        """As the API has it. A text that the server's end cut short has reached a length."""
        return "length" if self.events[-1].finished == "length" else "stop"

    def drafts(self) -> Drafts:
        """How drafting went. The first token comes without a step; each step emits one token that was not drafted."""
        histogram, run, steps_at = np.zeros(self.gamma + 1, np.int64), 0, []
        for event in self.events:
            steps_at.append(event.drafted.count(False))
            for drafted in event.drafted:
                run = run + 1 if drafted else run
                if not drafted:
                    histogram[run] += 1
                    run = 0
        # The first token is no step's.
        if self.tokens:
            histogram[0] -= 1
        pace = [
            1000 * (now - before) / steps
            for before, now, steps in zip(self.times, self.times[1:], steps_at[1:], strict=False)
            if steps
        ]
        return Drafts(
            steps=int(histogram.sum()),
            acceptance_length=_number(acceptance_length(histogram)),
            acceptance_by_position=[_number(share) for share in acceptance_by_position(histogram)],
            step_ms=statistics.median(pace) if pace else None,
        )

    def waits(self) -> tuple[float, float | None] | None:
        """Seconds to the first token, and between later ones; None where there was none."""
        if not self.events or not self.tokens:
            return None
        later = len(self.tokens) - len(self.events[0].tokens)
        return self.times[0] - self.arrived, (self.times[-1] - self.times[0]) / later if later else None


async def events(choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Event], None]:
    """All events of several choices as they come, each taken in by its choice before it is given on."""
    arrived: asyncio.Queue[tuple[Choice, Event] | Exception | None] = asyncio.Queue()

    async def follow(choice: Choice) -> None:
        try:
            async for event in choice.running:
                arrived.put_nowait((choice, event))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    followers = [asyncio.create_task(follow(choice)) for choice in choices]
    try:
        ended = 0
        while ended < len(choices):
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended += 1
            else:
                choice, event = item
                choice.take(event)
                yield choice, event
    finally:
        for follower in followers:
            follower.cancel()
        for follower in followers:
            with contextlib.suppress(asyncio.CancelledError):
                await follower


def logprobs_of(parts: Sequence[Event]) -> list[tuple[int, TokenLogprobs]]:
    """Each token with its log-probabilities."""
    return [(token, told) for event in parts for token, told in zip(event.tokens, event.logprobs or (), strict=False)]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
