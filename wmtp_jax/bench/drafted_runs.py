"""Runs several drafters on the same prompts, which are read once, and counts what each step of a row emits."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from wmtp_jax.bench.acceptance import accepted_by_step, histogram
from wmtp_jax.bench.options import AcceptOptions
from wmtp_jax.bench.shared_prefill import SharedPrefill
from wmtp_jax.decode.drafter import Drafter
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.prefill import prefill, start_state
from wmtp_jax.decode.sampling import Sampling, batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.generation.options import GenerateOptions
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import Packed, pack

# Below this, reading takes no time worth a line of progress.
_LONG_PROMPT = 2**15
_LINES_A_PROMPT = 4


class Run(NamedTuple):
    """One drafter on all prompts: each one's new tokens, and how many of its steps accepted 0 .. gamma drafts."""

    tokens: list[list[int]]
    histograms: Int[np.ndarray, "R N"]
    draft_cache_bytes_per_row: int


def run_drafters(
    model: Decoder,
    drafters: Sequence[Drafter],
    prompts: Sequence[list[int]],
    options: AcceptOptions,
    note: Callable[[str], None],
) -> list[Run]:
    """Every drafter's run on prompts of one length, in batches of one size, the last one filled up.

    Reading every step tells how many drafts each row accepted.
    """
    shared, rows = SharedPrefill(drafters=tuple(drafters)), min(options.rows, len(prompts))
    packed = pack(model)
    batches: list[list[Run]] = []
    for begin in range(0, len(prompts), rows):
        own = prompts[begin : begin + rows]
        note(f"prompts {begin + 1} to {begin + len(own)} of {len(prompts)}")
        sampling = batch_sampling(
            [
                SamplingParams(temperature=options.temperature, seed=(options.seed + begin + row) % 2**32)
                for row in range(rows)
            ]
        )
        state = _read(model, shared, [*own, *[own[0]] * (rows - len(own))], sampling, options, note)
        runs = [
            _decode(packed, drafter, shared.state_of(drafter, state), sampling, options.new_tokens)
            for drafter in drafters
        ]
        batches.append([Run(run.tokens[: len(own)], run.histograms[: len(own)], run[2]) for run in runs])
    return [_joined(runs) for runs in zip(*batches, strict=True)]


def _read(
    model: Decoder,
    shared: SharedPrefill,
    prompts: list[list[int]],
    sampling: Sampling,
    options: AcceptOptions,
    note: Callable[[str], None],
) -> DecodeState:
    state = start_state(
        model,
        shared,
        prompts,
        # Gamma more than counts, so that no step that counts is cut short by the limit.
        [options.new_tokens + options.gamma] * len(prompts),
        page_size=GenerateOptions.page_size,
        dtype=model.embedding.dtype,
        penalized=False,
    )
    progress = _progress(note) if len(prompts[0]) >= _LONG_PROMPT else None
    stops = _no_stops(len(prompts))
    return prefill(model, shared, state, prompts, sampling, stops, chunk=GenerateOptions.chunk, progress=progress)


def _progress(note: Callable[[str], None]) -> Callable[[int, int], None]:
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        if done * _LINES_A_PROMPT // total > told:
            told = done * _LINES_A_PROMPT // total
            note(f"{done} of {total} tokens read")

    return tell


def _decode(model: Packed[Decoder], drafter: Drafter, state: DecodeState, sampling: Sampling, new_tokens: int) -> Run:
    stops = _no_stops(len(state.pending))
    tokens = [[token] for token in state.pending.tolist()]
    runs: list[list[int]] = [[1] for _ in tokens]
    cache_bytes = _nbytes(state.draft) // len(tokens)
    while min(map(len, tokens)) < new_tokens:
        state, emitted = decode(model, drafter, state, sampling, stops, 1)
        for row, (new, count) in enumerate(zip(emitted.tokens.tolist(), emitted.count.tolist(), strict=True)):
            tokens[row] += new[:count]
            runs[row].append(count)
    histograms = [histogram(accepted_by_step(own, new_tokens), drafter.gamma) for own in runs]
    return Run([row[:new_tokens] for row in tokens], np.stack(histograms), cache_bytes)


def _joined(runs: Sequence[Run]) -> Run:
    tokens = [row for run in runs for row in run.tokens]
    return Run(tokens, np.concatenate([run.histograms for run in runs]), runs[0].draft_cache_bytes_per_row)


def _no_stops(rows: int) -> Int[Array, "B 1"]:
    """No token has a negative id: end-of-text tokens do not end a row."""
    return jnp.full((rows, 1), -1)


def _nbytes(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))
