"""Acceptance of drafts by position, native and windowed, as the context grows: on held-out text and on long tasks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wmtp_jax.bench.acceptance import Estimate, estimate, first_difference, length_difference, repeated_share
from wmtp_jax.bench.drafted_runs import Run, run_drafters
from wmtp_jax.bench.options import CONTINUATION, AcceptOptions
from wmtp_jax.bench.tasks import Haystack, TaskPrompt, haystack, task_prompt
from wmtp_jax.bench.texts import long_documents, prompt_ends
from wmtp_jax.config import ModelConfig
from wmtp_jax.decode.drafter import MTPDrafter, Plain
from wmtp_jax.errors import UserError
from wmtp_jax.generation.stats import acceptance_by_position, acceptance_length
from wmtp_jax.model import Model
from wmtp_jax.text.documents import read_texts


class Difference(NamedTuple):
    """Where a text first differs from the one of plain decoding."""

    prompt: int
    token: int


@dataclass(frozen=True, kw_only=True)
class DrafterResult:
    """One drafter in one context; ``window`` 0 is native.

    ``histograms`` count each prompt's steps by how many drafts they accepted, ``histogram`` those of all prompts.
    ``acceptance[j]`` is how often draft j + 1 was right among the steps that reached it. ``length_minus_native`` is
    paired, prompt by prompt; None for native itself and where native was not measured.
    """

    window: int
    sink: int
    histogram: list[int]
    histograms: list[list[int]]
    acceptance: list[Estimate]
    acceptance_length: Estimate
    length_minus_native: Estimate | None
    draft_cache_bytes_per_row: int
    first_difference: Difference | None


@dataclass(frozen=True, kw_only=True)
class ContextResult:
    """All drafters on one task after prompts of ``context`` tokens.

    ``repeated`` is of the new text: see ``repeated_share``. ``answered`` is the share of the expected answers that
    occur in it; None for a continuation, which expects none. ``seconds`` include reading the prompts, which all
    drafters share, and compilation.
    """

    task: str
    context: int
    beyond_trained: bool
    beyond_positions: bool
    prompts: int
    repeated: float
    answered: float | None
    seconds: float
    drafters: list[DrafterResult]

    @property
    def same_text(self) -> bool:
        """Whether every drafter gave the tokens of plain decoding."""
        return all(drafter.first_difference is None for drafter in self.drafters)


def measure(
    model: Model, options: AcceptOptions, text: Path | None, trained_context: int, note: Callable[[str], None]
) -> list[ContextResult]:
    """Runs every task and context with plain decoding and with every drafter, on the same prompts.

    Prompts are read once for all drafters. Each drafter compiles once a context, whatever the tasks and the number of
    prompts. A context may exceed the model's ``max_positions``; the result says so. Raises UserError where the model
    has no draft head, the text is too short for a context, or a context for a task.
    """
    if not model.config.has_mtp:
        raise UserError("this checkpoint has no MTP head, so there are no drafts to accept")
    prompts = _Prompts(model, options, text, note)
    results = []
    # All prompts before the first run: what cannot be made should fail at once.
    for task, context, made in [(t, c, prompts.make(t, c)) for t in options.tasks for c in options.contexts]:
        beyond = context > trained_context, _positions(context, options) > model.config.max_positions
        results.append(_measure_context(model, task, made, options, beyond, note))
    return results


def trained_context(config: ModelConfig) -> int:
    """The context that a model was made for, before any stretching of its rotary positions."""
    rope = config.attention.rope
    scaling = rope.scaling if rope else None
    return (scaling.original_max_positions if scaling else 0) or config.max_positions


def _positions(context: int, options: AcceptOptions) -> int:
    """The most positions that a row with a prompt of ``context`` tokens fills."""
    return context + options.new_tokens + 2 * options.gamma


class _Prompts:
    """Makes each task's prompts out of one text.

    All contexts' continuations end at the same places, so that contexts differ in nothing but how far back they reach.
    """

    def __init__(self, model: Model, options: AcceptOptions, text: Path | None, note: Callable[[str], None]):
        texts, self._model, self._options = read_texts(text), model, options
        self._start = model.encode("")
        self._haystack: Haystack | None = None
        if set(options.tasks) != {CONTINUATION}:
            self._haystack = haystack(texts, model.encode_bare)
        if CONTINUATION in options.tasks:
            self._place_continuations([model.encode(text) for text in texts], note)

    def _place_continuations(self, documents: list[list[int]], note: Callable[[str], None]) -> None:
        longest, count = max(self._options.contexts), self._options.prompts
        self._documents = long_documents(documents, longest)
        if len(self._documents) != len(documents):
            note(f"no document has {longest} tokens: continuing all of them as one text")
        self._ends = prompt_ends([len(ids) for ids in self._documents], longest, count)
        if len(self._ends) < count:
            note(f"the text has only {len(self._ends)} different prompts of {longest} tokens")

    def make(self, task: str, context: int) -> list[TaskPrompt]:
        """The prompts of one task, each of exactly ``context`` tokens."""
        if task == CONTINUATION:
            return [TaskPrompt(self._documents[d][end - context : end], ()) for d, end in self._ends]
        assert self._haystack is not None
        room, count = context - len(self._start), self._options.prompts
        made = [task_prompt(task, self._haystack, room, i, count, self._options.seed) for i in range(count)]
        return [TaskPrompt([*self._start, *prompt.ids], prompt.answers) for prompt in made]


def _measure_context(
    model: Model,
    task: str,
    prompts: list[TaskPrompt],
    options: AcceptOptions,
    beyond: tuple[bool, bool],
    note: Callable[[str], None],
) -> ContextResult:
    context, begin = len(prompts[0].ids), time.perf_counter()
    drafters = [MTPDrafter(gamma=options.gamma, window=window, sink=sink) for window, sink in options.drafters]

    def told(line: str) -> None:
        note(f"{task}, context {context}: {line}")

    told(f"decoding in {1 + len(drafters)} ways")
    ids = [prompt.ids for prompt in prompts]
    plain, *runs = run_drafters(model.decoder, [Plain(), *drafters], ids, options, told)
    native = next((run for run, drafter in zip(runs, drafters, strict=True) if not drafter.window), None)
    return ContextResult(
        task=task,
        context=context,
        beyond_trained=beyond[0],
        beyond_positions=beyond[1],
        prompts=len(prompts),
        repeated=float(np.mean([repeated_share(tokens) for tokens in plain.tokens])),
        answered=_answered(model, prompts, plain.tokens),
        seconds=time.perf_counter() - begin,
        drafters=[_drafter_result(run, plain, native, d) for run, d in zip(runs, drafters, strict=True)],
    )


def _answered(model: Model, prompts: Sequence[TaskPrompt], texts: Sequence[list[int]]) -> float | None:
    """The share of the expected answers that occur in the texts; None where none is expected."""
    found = [
        answer in text
        for prompt, text in zip(prompts, map(model.decode, texts), strict=True)
        for answer in prompt.answers
    ]
    return float(np.mean(found)) if found else None


def _drafter_result(run: Run, plain: Run, native: Run | None, drafter: MTPDrafter) -> DrafterResult:
    difference = None
    if native is not None and native is not run:
        difference = estimate(np.stack([native.histograms, run.histograms], axis=1), length_difference)
    return DrafterResult(
        window=drafter.window,
        sink=drafter.sink,
        histogram=run.histograms.sum(axis=0).tolist(),
        histograms=run.histograms.tolist(),
        acceptance=[
            estimate(run.histograms, lambda counts, j=j: acceptance_by_position(counts)[j])
            for j in range(drafter.gamma)
        ],
        acceptance_length=estimate(run.histograms, acceptance_length),
        length_minus_native=difference,
        draft_cache_bytes_per_row=run.draft_cache_bytes_per_row,
        first_difference=_first_difference(plain.tokens, run.tokens),
    )


def _first_difference(plain: Sequence[list[int]], drafted: Sequence[list[int]]) -> Difference | None:
    for prompt, (left, right) in enumerate(zip(plain, drafted, strict=True)):
        token = first_difference(left, right)
        if token is not None:
            return Difference(prompt, token)
    return None
