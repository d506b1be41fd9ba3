"""The same prompt three ways: without drafts, with the native draft head, with the windowed one."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wmtp_jax.errors import UserError
from wmtp_jax.generation.options import GenerateOptions
from wmtp_jax.generation.stream import Generation, generate, stream
from wmtp_jax.model import Model

# Where the default window would cover everything, this share of the context shows what a window does.
_SHARE = 4
_MIN_WINDOW = 16
_SMALL_SINK = 4


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Each way's output by its name, and the window that the windowed one had.

    ``context`` is the most positions a row can fill; a window and sink of that size or more change nothing.
    """

    runs: dict[str, Generation]
    window: int
    sink: int
    context: int

    @property
    def covers_everything(self) -> bool:
        """Whether no draft saw less than the whole context."""
        return not self.window or self.window + self.sink >= self.context

    def same_text(self, name: str) -> bool:
        """Whether a run gave the tokens of plain decoding."""
        return self.runs[name].tokens == self.runs["plain"].tokens


def compare(
    model: Model, prompt: list[int], *, on_run: Callable[[str], None] | None = None, **options: Any
) -> Comparison:
    """Runs plain, native and windowed, each after a warm-up of the same shapes: no figure contains a compilation.

    ``options`` are those of ``generate``; ``gamma`` is of the drafted runs. Without a ``window`` it is the default
    one, or a quarter of the context (a power of two) with a sink of 4 where that would cover everything.
    """
    given = GenerateOptions(**options)
    if not given.gamma or given.drafter is not None:
        raise UserError("a comparison drafts with the model's MTP head: give gamma from 1 on, and no drafter")
    if given.accept != "verify":
        raise UserError(f"a comparison is of texts that are the same: not of accept={given.accept}, which changes them")
    context = len(prompt) + given.max_new_tokens
    window, sink = given.window, given.draft_sink
    if "window" not in options and window + sink >= context:
        window = max(_MIN_WINDOW, 1 << max((context // _SHARE).bit_length() - 1, 0))
        sink = _SMALL_SINK if given.sink is None else sink
    ways = {
        "plain": dict(gamma=0, window=0, sink=0),
        "native": dict(window=0, sink=0),
        "windowed": dict(window=window, sink=sink),
    }
    runs = {}
    for name, way in ways.items():
        if on_run:
            on_run(name)
        warm_up = stream(model, prompt, **options | way)
        for _ in itertools.islice(warm_up, 2):
            pass
        runs[name] = generate(model, prompt, **options | way)
    return Comparison(runs=runs, window=window, sink=sink, context=context)
