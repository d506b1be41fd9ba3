"""One request on its way through the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.engine.prefixes import Key
from wmtp_jax.generation.options import GenerateOptions
from wmtp_jax.generation.rows import Event, Row

# Gets every event of a request, and None with the error that ended it in place of a last event.
Listener = Callable[[Event | None, Exception | None], None]


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
    # Given as it joins the queue; the lower, the older.
    arrival: int = 0
    to_read: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    read: int = 0
    reading: bool = False

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

    def take(self, tokens: Sequence[int]) -> None:
        """Hands over what was emitted."""
        self.listener(self.row.take(tokens), None)
