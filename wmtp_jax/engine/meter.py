"""What an engine counts while it runs."""

from dataclasses import dataclass, field

import numpy as np

from wmtp_jax.decode.loop import Emitted
from wmtp_jax.engine.pages import PagePool
from wmtp_jax.generation.stats import acceptance_by_position, acceptance_length


@dataclass
class EngineMeter:
    """Counts since the start, and how things stood at the last turn's end.

    ``prefill_tokens`` were read, of prompts and again of requests that had to give way; ``reused_tokens`` were not,
    since an earlier prompt began alike. ``output_tokens`` were handed over, ``emitted_tokens`` of them by steps: the
    others came first in their texts. ``histogram`` counts rows' steps by the tokens that they emitted, from one on,
    ``drafted_histogram`` those alone that drafted.
    """

    gamma: int
    finished: int = 0
    preempted: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    steps: int = 0
    emitted_tokens: int = 0
    output_tokens: int = 0
    waiting: int = 0
    running: int = 0
    most_running: int = 0
    pages: int = 0
    free_pages: int = 0
    histogram: np.ndarray = field(init=False)
    drafted_histogram: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.histogram = np.zeros(self.gamma + 1, np.int64)
        self.drafted_histogram = np.zeros(self.gamma + 1, np.int64)

    def add(self, emitted: Emitted, *, drafting: bool) -> None:
        """Takes in one call of the loop."""
        self.steps += int(emitted.steps)
        self.emitted_tokens += int(np.sum(emitted.count))
        self.histogram += np.asarray(emitted.accepted)
        if drafting:
            self.drafted_histogram += np.asarray(emitted.accepted)

    def observe(self, waiting: int, running: int, pool: PagePool) -> None:
        """Takes in how things stand."""
        self.waiting, self.running, self.pages, self.free_pages = waiting, running, pool.pages, pool.free

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a row's step emits; NaN before the first."""
        return acceptance_length(self.histogram)

    @property
    def acceptance_by_position(self) -> list[float]:
        """How often each draft was right where those before it were."""
        return acceptance_by_position(self.drafted_histogram)
