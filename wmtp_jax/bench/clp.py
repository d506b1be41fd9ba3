"""Every way to use heads in one run: trusted by each rule, verified with fixed and chosen numbers, against plain.

All ways decode the same prompts in the same loop machinery, batch by batch in turn, so that whatever else the machine
does meets all of them, and plain decoding runs twice to show what is left of it. Quality is judged by the backbone
itself: how unlikely it finds the text, how long the text is the one that it would have written, and how much the text
repeats itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from wmtp_jax.bench.clp_quality import Quality, quality
from wmtp_jax.bench.clp_ways import PLAIN, PLAIN_AGAIN, Way, ways
from wmtp_jax.bench.options import ClpOptions
from wmtp_jax.bench.timing import Estimated, estimated_ratio
from wmtp_jax.errors import UserError
from wmtp_jax.generation.stats import acceptance_by_position, acceptance_length
from wmtp_jax.generation.stream import Generation, generate
from wmtp_jax.model import Model


class Asked(NamedTuple):
    """A prompt's kind, its tokens, and where in its file it stands."""

    kind: str
    tokens: list[int]
    index: int


@dataclass(frozen=True, kw_only=True)
class ClpResult:
    """A way at one batch size.

    - ``speedup``: tokens a second over plain decoding's on the same prompts; ``speedup_by_kind`` of each kind's.
    - ``step_ms``: mean milliseconds of a step of the loop.
    - ``accuracy``: of each draft where the drafts before it were right, of verified ways with a fixed number of drafts.
    - ``texts``: by the prompt's index.
    - ``suspect``: faster than its tokens a step allow, beyond the noise; a fault of the measurement.
    """

    way: str
    rows: int
    verified: bool
    tokens_a_step: float
    step_ms: float
    speedup: Estimated
    speedup_by_kind: dict[str, Estimated]
    accuracy: list[float] | None
    quality: Quality
    suspect: bool
    texts: dict[int, str] = field(repr=False)


class _Run(NamedTuple):
    """One batch once, decoding alone."""

    kind: str
    seconds: float
    tokens: int
    steps: int

    @property
    def seconds_a_token(self) -> float:
        return self.seconds / max(self.tokens, 1)


@dataclass(kw_only=True)
class _Measured:
    """One way's runs; ``outputs`` are those of the first round."""

    runs: list[_Run] = field(default_factory=list)
    batches: int
    histogram: np.ndarray | int = 0
    outputs: list[Generation] = field(default_factory=list)
    costs: list[float] | None = None

    @property
    def by_batch(self) -> list[_Run]:
        """All rounds of each batch as one run: rounds of one batch are no independent samples."""
        rounds = [self.runs[i : i + self.batches] for i in range(0, len(self.runs), self.batches)]
        return [
            _Run(runs[0].kind, sum(r.seconds for r in runs), sum(r.tokens for r in runs), sum(r.steps for r in runs))
            for runs in zip(*rounds, strict=True)
        ]


def measure(
    backbone: Model,
    heads: Sequence[Path],
    prompts: Sequence[Asked],
    options: ClpOptions,
    note: Callable[[str], None],
) -> list[ClpResult]:
    """Every way at every batch size, on the first prompts; batches have prompts of one kind as far as they divide.

    Raises UserError for too few prompts.
    """
    if len(prompts) < options.prompts:
        raise UserError(f"--prompts {options.prompts}: the file has {len(prompts)}")
    chosen = sorted(prompts[: options.prompts], key=lambda prompt: prompt.kind)
    every = ways(backbone, heads, options)
    return [result for rows in options.rows for result in _at(every, backbone, chosen, rows, options, note)]


def _at(
    every: list[Way],
    backbone: Model,
    prompts: list[Asked],
    rows: int,
    options: ClpOptions,
    note: Callable[[str], None],
) -> list[ClpResult]:
    batches = [prompts[i : i + rows] for i in range(0, len(prompts), rows)]
    measured = {way.name: _Measured(batches=len(batches)) for way in every}
    for way in every:
        note(f"{rows} rows: warming up {way.name}")
        measured[way.name].costs = _generate(way, batches[0], options, None).stats.step_costs
    for turn in range(options.repeats):
        for index, batch in enumerate(batches):
            note(f"{rows} rows: round {turn + 1} of {options.repeats}, batch {index + 1} of {len(batches)}")
            # Each batch begins elsewhere: no way has always the same one before it.
            for way in (*every[index % len(every) :], *every[: index % len(every)]):
                _run(way, measured[way.name], batch, options, keep=turn == 0)
    plain, again = measured[PLAIN], measured[PLAIN_AGAIN]
    noise = _speedup(again.by_batch, plain.by_batch)
    return [_result(way, measured[way.name], plain, noise, backbone, prompts, rows) for way in every]


def _generate(way: Way, batch: list[Asked], options: ClpOptions, costs: list[float] | None) -> Generation:
    given = dict(way.options)
    if costs is not None:
        given["step_costs"] = costs
    return generate(way.model, [prompt.tokens for prompt in batch], max_new_tokens=options.new_tokens, **given)


def _run(way: Way, into: _Measured, batch: list[Asked], options: ClpOptions, *, keep: bool) -> None:
    out = _generate(way, batch, options, into.costs)
    kinds = {prompt.kind for prompt in batch}
    into.runs.append(
        _Run(
            kind=kinds.pop() if len(kinds) == 1 else "mixed",
            seconds=out.stats.decode_seconds,
            tokens=out.stats.new_tokens - len(batch),
            steps=out.stats.verify_steps,
        )
    )
    if keep:
        into.histogram = into.histogram + np.array(out.stats.accepted_histogram)
        into.outputs.append(out)


def _speedup(runs: Sequence[_Run], plain: Sequence[_Run]) -> Estimated:
    """Seconds a plain token over seconds a token, each batch counted by its plain tokens.

    So a way that writes longer answers to some prompts is not judged by another mixture of prompts.
    """
    weights = [run.tokens for run in plain]
    above = [w * run.seconds_a_token for w, run in zip(weights, plain, strict=True)]
    below = [w * run.seconds_a_token for w, run in zip(weights, runs, strict=True)]
    return estimated_ratio(above, below)


def _result(
    way: Way,
    found: _Measured,
    plain: _Measured,
    noise: Estimated,
    backbone: Model,
    prompts: list[Asked],
    rows: int,
) -> ClpResult:
    assert isinstance(found.histogram, np.ndarray)
    runs, beside = found.by_batch, plain.by_batch
    speedup = _speedup(runs, beside)
    by_kind = {
        kind: _speedup(*([run for run in one if run.kind == kind] for one in (runs, beside)))
        for kind in dict.fromkeys(run.kind for run in beside)
    }
    length = acceptance_length(found.histogram)
    texts, greedy = ([tokens for out in one.outputs for tokens in out.tokens] for one in (found, plain))
    written = [text for out in found.outputs for text in out.text]
    return ClpResult(
        way=way.name,
        rows=rows,
        verified=way.verified,
        tokens_a_step=length,
        step_ms=1000 * sum(run.seconds for run in runs) / sum(run.steps for run in runs),
        speedup=speedup,
        speedup_by_kind=by_kind if len(by_kind) > 1 else {},
        accuracy=acceptance_by_position(found.histogram) if way.verified and found.costs is None else None,
        quality=quality(backbone.decoder, [prompt.tokens for prompt in prompts], texts, greedy),
        suspect=speedup.low > length * max(noise.high, 1 / noise.low),
        texts=dict(sorted(zip((prompt.index for prompt in prompts), written, strict=True))),
    )
