"""Acceptance of drafts by position, native and windowed, as the context grows."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from wmtp_jax.bench.acceptance import (
    Estimate,
    accepted_by_step,
    estimate,
    first_difference,
    histogram,
    length_difference,
    repeated_share,
)
from wmtp_jax.bench.options import AcceptOptions
from wmtp_jax.bench.texts import prompt_ends, read_texts
from wmtp_jax.config import ModelConfig
from wmtp_jax.errors import UserError
from wmtp_jax.generation.stats import acceptance_by_position, acceptance_length
from wmtp_jax.generation.stream import stream
from wmtp_jax.model import Model


class Difference(NamedTuple):
    """Where a text first differs from the one of plain decoding."""

    prompt: int
    token: int


@dataclass(frozen=True, kw_only=True)
class DrafterResult:
    """One drafter in one context; ``window`` 0 is native.

    ``histogram`` counts steps by how many drafts they accepted. ``acceptance[j]`` is how often draft j + 1 was right
    among the steps that reached it. ``length_minus_native`` is paired, prompt by prompt; None for native itself and
    where native was not measured.
    """

    window: int
    sink: int
    histogram: list[int]
    acceptance: list[Estimate]
    acceptance_length: Estimate
    length_minus_native: Estimate | None
    draft_cache_bytes_per_row: int
    first_difference: Difference | None


@dataclass(frozen=True, kw_only=True)
class ContextResult:
    """All drafters after prompts of ``context`` tokens. ``repeated`` is of the new text: see ``repeated_share``."""

    context: int
    beyond_trained: bool
    prompts: int
    repeated: float
    drafters: list[DrafterResult]

    @property
    def same_text(self) -> bool:
        """Whether every drafter gave the tokens of plain decoding."""
        return all(drafter.first_difference is None for drafter in self.drafters)


class _Run(NamedTuple):
    tokens: list[list[int]]
    histograms: Int[np.ndarray, "R N"]
    draft_cache_bytes_per_row: int


def measure(
    model: Model, options: AcceptOptions, text: Path | None, trained_context: int, note: Callable[[str], None]
) -> list[ContextResult]:
    """Runs every context with plain decoding and then with every drafter, on the same prompts.

    All contexts' prompts end at the same places of the text, so that contexts differ in nothing but how far back they
    reach. Each drafter compiles once a context, whatever the number of prompts: they run in batches of one size, the
    last one filled up. Raises UserError where the text or the model is too short for a context.
    """
    _check(model.config, options)
    texts = [model.encode(text) for text in read_texts(text)]
    ends = prompt_ends([len(ids) for ids in texts], max(options.contexts), options.prompts)
    if len(ends) < options.prompts:
        note(f"the text has only {len(ends)} different prompts of {max(options.contexts)} tokens")
    # Without a tokenizer, streams spend no time on text that nobody reads.
    silent = dataclasses.replace(model, tokenizer=None)
    results = []
    for context in options.contexts:
        prompts = [texts[document][end - context : end] for document, end in ends]
        results.append(_measure_context(silent, prompts, options, context > trained_context, note))
    return results


def trained_context(config: ModelConfig) -> int:
    """The context that a model was made for, before any stretching of its rotary positions."""
    rope = config.attention.rope
    scaling = rope.scaling if rope else None
    return (scaling.original_max_positions if scaling else 0) or config.max_positions


def _check(config: ModelConfig, options: AcceptOptions) -> None:
    if not config.has_mtp:
        raise UserError("this checkpoint has no MTP head, so there are no drafts to accept")
    needed = max(options.contexts) + options.new_tokens + 2 * options.gamma
    if needed > config.max_positions:
        raise UserError(
            f"a context of {max(options.contexts)} and its new tokens need {needed} positions, and the model has "
            f"max_positions={config.max_positions}: give shorter contexts"
        )


def _measure_context(
    model: Model, prompts: list[list[int]], options: AcceptOptions, beyond: bool, note: Callable[[str], None]
) -> ContextResult:
    context = len(prompts[0])
    note(f"context {context}: plain decoding of {len(prompts)} prompts")
    plain = _run(model, prompts, options, gamma=0, window=0)
    native: _Run | None = None
    drafters = []
    # Native first: the windows are compared with it.
    for window in sorted(options.windows):
        note(f"context {context}: {f'window {window}' if window else 'native'}")
        run = _run(model, prompts, options, gamma=options.gamma, window=window)
        native = native if window else run
        drafters.append(_drafter_result(run, plain, native, options, window))
    return ContextResult(
        context=context,
        beyond_trained=beyond,
        prompts=len(prompts),
        repeated=float(np.mean([repeated_share(tokens) for tokens in plain.tokens])),
        drafters=drafters,
    )


def _run(model: Model, prompts: list[list[int]], options: AcceptOptions, *, gamma: int, window: int) -> _Run:
    """One drafter on all prompts, a batch at a time. Reading every step tells how many drafts each row accepted."""
    tokens: list[list[int]] = []
    histograms, cache_bytes, rows = [], 0, min(options.rows, len(prompts))
    for begin in range(0, len(prompts), rows):
        own = prompts[begin : begin + rows]
        batch = own + [own[0]] * (rows - len(own))
        running = stream(
            model,
            batch,
            max_new_tokens=options.new_tokens + gamma,
            gamma=gamma,
            window=window,
            sink=options.sink if window else 0,
            temperature=options.temperature,
            seed=[(options.seed + begin + row) % 2**32 for row in range(rows)],
            ignore_eos=True,
            steps_per_read=1,
        )
        runs: list[list[int]] = [[] for _ in batch]
        for event in running:
            runs[event.row].append(len(event.tokens))
        out = running.generation()
        cache_bytes = out.stats.draft_cache_bytes // rows
        tokens += [row[: options.new_tokens] for row in out.tokens[: len(own)]]
        histograms += [histogram(accepted_by_step(row, options.new_tokens), gamma) for row in runs[: len(own)]]
    return _Run(tokens, np.stack(histograms), cache_bytes)


def _drafter_result(run: _Run, plain: _Run, native: _Run | None, options: AcceptOptions, window: int) -> DrafterResult:
    difference = None
    if native is not None and native is not run:
        difference = estimate(np.stack([native.histograms, run.histograms], axis=1), length_difference)
    return DrafterResult(
        window=window,
        sink=options.sink if window else 0,
        histogram=run.histograms.sum(axis=0).tolist(),
        acceptance=[
            estimate(run.histograms, lambda counts, j=j: acceptance_by_position(counts)[j])
            for j in range(options.gamma)
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
