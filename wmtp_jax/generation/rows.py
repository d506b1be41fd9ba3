"""One row's output: its tokens, its text, and why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from wmtp_jax.generation.options import GenerateOptions
from wmtp_jax.model import Model
from wmtp_jax.text.detokenizer import Detokenizer
from wmtp_jax.text.stops import StopStrings
from wmtp_jax.text.tokenizer import special_ids

Finished = Literal["stop", "length", "stop string"]


class TokenLogprobs(NamedTuple):
    """A token's log-probability (natural, the model's own: before penalties, temperature and filters).

    ``top`` are the most probable tokens with theirs, best first.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one row gained: ``finished`` comes with its last event, None before.

    Texts of all events of a row make its text; ``tokens`` may be ahead of it, as text is held back within a character
    and where a stop string could begin. ``pieces`` are the text by the token that it came with. The engine says of
    each token whether it was ``drafted``, and gives ``logprobs`` to those who asked for them.
    """

    row: int
    text: str
    tokens: list[int]
    finished: Finished | None
    pieces: list[str] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None


class Row:
    """Takes a row's tokens as they come; tokens after its end are dropped."""

    def __init__(self, index: int, prompt: Sequence[int], model: Model, options: GenerateOptions):
        self.index = index
        self.tokens: list[int] = []
        self.text = ""
        self.finished: Finished | None = None
        self._limit = options.max_new_tokens
        self._eos = frozenset(() if options.ignore_eos else model.eos_ids)
        self._detokenizer = Detokenizer(model.decode, prompt) if model.tokenizer is not None else None
        self._silent = special_ids(model.tokenizer) | self._eos if model.tokenizer is not None else self._eos
        self._stops = StopStrings(options.stop_strings)

    def take(self, tokens: Sequence[int]) -> Event:
        """Appends tokens up to the row's end."""
        taken, pieces, finished = [], [], self.finished
        for token in tokens:
            if finished:
                break
            taken.append(token)
            pieces.append(self._text_of(token))
            finished = self._reason(token, len(self.tokens) + len(taken))
        if finished and not self.finished:
            rest, stopped = self._rest()
            if pieces:
                pieces[-1] += rest
            finished = "stop string" if stopped else finished
        text = "".join(pieces)
        self.tokens += taken
        self.text += text
        # Last: who sees from another thread that the row has ended sees all of it.
        self.finished = finished
        return Event(row=self.index, text=text, tokens=taken, finished=finished, pieces=pieces)

    def cut_short(self) -> Event:
        """Ends the row where it stands, as if that had been its limit."""
        rest, stopped = self._rest()
        self.text += rest
        self.finished = "stop string" if stopped else "length"
        return Event(row=self.index, text=rest, tokens=[], finished=self.finished)

    def _text_of(self, token: int) -> str:
        if self._detokenizer is None or token in self._silent:
            return ""
        return self._stops.push(self._detokenizer.push(token))

    def _reason(self, token: int, count: int) -> Finished | None:
        if self._stops.found:
            return "stop string"
        if token in self._eos:
            return "stop"
        return "length" if count >= self._limit else None

    def _rest(self) -> tuple[str, bool]:
        """What was held back, and whether a stop string was found in it: the last incomplete character can make one."""
        if self._detokenizer is None:
            return "", False
        rest = self._stops.push(self._detokenizer.finish())
        return rest + self._stops.finish(), self._stops.found
