"""Every way to use heads in one run: trusted by each rule, verified with fixed and chosen numbers, against plain.

All ways decode the same prompts in the same loop machinery; rounds go through all ways in turn, so that whatever else
the machine does meets all of them. Quality is judged by the backbone itself: how unlikely it finds the text, how long
the text is the one that it would have written, and how much the text repeats itself.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from wmtp_jax.bench.acceptance import first_difference, repeated_share
from wmtp_jax.bench.timing import Spread
from wmtp_jax.clp.config import HeadsConfig
from wmtp_jax.clp.store import attach, load_heads
from wmtp_jax.errors import UserError
from wmtp_jax.generation.options import ACCEPTS, GenerateOptions
from wmtp_jax.generation.stats import acceptance_by_position, acceptance_length
from wmtp_jax.generation.stream import Generation, generate
from wmtp_jax.model import Model
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.option_checks import require

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class ClpOptions:
    """What to measure: ``rows`` are batch sizes, each measured ``repeats`` times on ``prompts`` prompts."""

    rows: tuple[int, ...] = (1,)
    prompts: int = 16
    new_tokens: int = 96
    repeats: int = 3
    tau: float = GenerateOptions.tau
    window: int = 0
    sink: int = 0

    def __post_init__(self) -> None:
        require("prompts", self.prompts, 1)
        require("new-tokens", self.new_tokens, 2)
        require("repeats", self.repeats, 1)
        GenerateOptions(tau=self.tau, window=self.window, sink=self.sink)
        if not all(rows > 0 and self.prompts % rows == 0 for rows in self.rows):
            raise UserError(f"--rows {','.join(map(str, self.rows))}: must divide the {self.prompts} prompts")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to decode: the backbone, perhaps with heads, and the options of ``generate``."""

    name: str
    model: Model
    options: dict[str, Any]
    # Whether the text is the backbone's own by construction.
    verified: bool


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What became of the text, over all prompts.

    ``perplexity`` is the backbone's, of the new tokens. ``agreed`` is the mean number of tokens before the first that
    greedy decoding would not have written, and ``same`` the share of texts without one.
    """

    perplexity: float
    repeated_3: float
    repeated_4: float
    distinct_1: float
    distinct_2: float
    agreed: float
    same: float


@dataclass(frozen=True, kw_only=True)
class ClpResult:
    """A way at one batch size. ``speedup`` compares tokens a second with plain ones round by round.

    ``accuracy``: of each draft where the drafts before it were right, of verified ways with a fixed number of drafts.
    ``suspect``: faster than its tokens a step allow, beyond the noise of plain decoding; a fault of the measurement.
    """

    way: str
    rows: int
    verified: bool
    tokens_a_step: float
    step_ms: Spread
    speedup: Spread
    accuracy: list[float] | None
    quality: Quality
    suspect: bool
    texts: list[str] = field(repr=False)


def ways(backbone: Model, heads: Sequence[Path], options: ClpOptions) -> list[Way]:
    """Plain decoding, and for every file of heads each rule at each number of heads, and verification."""
    found = [Way(name=PLAIN, model=backbone, options=dict(gamma=0), verified=True)]
    for path in heads:
        read, vocabulary = load_heads(path, backbone.decoder)
        decoder = attach(backbone.decoder, read, vocabulary)
        model = Model(
            decoder=decoder,
            config=backbone.config,
            tokenizer=backbone.tokenizer,
            chat_template=backbone.chat_template,
        )
        found += _ways_of(read.config, model, options)
    names = [way.name for way in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two files of heads give {twice!r}; give one of a kind and number")
    return found


def _ways_of(config: HeadsConfig, model: Model, options: ClpOptions) -> Iterator[Way]:
    kind = f"{config.kind}{' competing' if config.competing else ''}"
    window = dict(window=options.window, sink=options.sink)
    for accept in ACCEPTS[1:]:
        for k in range(1, config.drafts + 1):
            # The paper begins at two heads; a gate or threshold does the same with one.
            if config.competing and accept != "all":
                continue
            rule = dict(accept=accept, gamma=k, tau=options.tau if accept == "clp" else 0.5)
            yield Way(name=f"{kind}: {accept}, k={k}", model=model, options=rule | window, verified=False)
    if config.competing:
        return
    for gamma in (*range(1, config.drafts + 1), "auto"):
        yield Way(name=f"{kind}: verified, {gamma}", model=model, options=dict(gamma=gamma) | window, verified=True)


def measure(
    backbone: Model,
    heads: Sequence[Path],
    prompts: Sequence[list[int]],
    options: ClpOptions,
    note: Callable[[str], None],
) -> list[ClpResult]:
    """Every way at every batch size. Texts are those of the first round."""
    chosen = list(prompts[: options.prompts])
    if not chosen or not all(chosen):
        raise UserError("the prompts are empty: give a file with at least one prompt")
    results, every = [], ways(backbone, heads, options)
    for rows in options.rows:
        batches = [chosen[i : i + rows] for i in range(0, len(chosen), rows)]
        results += _measure_rows(every, backbone, batches, rows, options, note)
    return results


@dataclass(kw_only=True)
class _Measured:
    """One way's runs: seconds and tokens of decoding of every round, and the first round's outputs."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    histogram: np.ndarray | None = None
    outputs: list[Generation] = field(default_factory=list)
    costs: list[float] | None = None


def _measure_rows(
    every: list[Way],
    backbone: Model,
    batches: list[list[list[int]]],
    rows: int,
    options: ClpOptions,
    note: Callable[[str], None],
) -> list[ClpResult]:
    measured = {way.name: _Measured() for way in every}
    for way in every:
        note(f"{rows} rows: warming up {way.name}")
        out = _generate(way, batches[0], options, None)
        measured[way.name].costs = out.stats.step_costs
    for turn in range(options.repeats):
        for way in every:
            note(f"{rows} rows: round {turn + 1} of {options.repeats}, {way.name}")
            _one_round(way, measured[way.name], batches, options, keep=turn == 0)
    plain = measured[PLAIN]
    noise = Spread(n / s for n, s in zip(plain.tokens, plain.seconds, strict=True))
    return [_result(way, measured[way.name], plain, noise, backbone, batches, rows) for way in every]


def _generate(way: Way, batch: list[list[int]], options: ClpOptions, costs: list[float] | None) -> Generation:
    given = dict(way.options)
    if costs is not None:
        given["step_costs"] = costs
    return generate(way.model, batch, max_new_tokens=options.new_tokens, **given)


def _one_round(way: Way, into: _Measured, batches: list[list[list[int]]], options: ClpOptions, *, keep: bool) -> None:
    seconds, tokens, steps = 0.0, 0, 0
    for batch in batches:
        out = _generate(way, batch, options, into.costs)
        seconds += out.stats.decode_seconds
        tokens += out.stats.new_tokens - len(batch)
        steps += out.stats.verify_steps
        if keep:
            counts = np.array(out.stats.accepted_histogram)
            into.histogram = counts if into.histogram is None else into.histogram + counts
            into.outputs.append(out)
    into.seconds.append(seconds)
    into.tokens.append(tokens)
    into.steps.append(steps)


def _result(
    way: Way,
    found: _Measured,
    plain: _Measured,
    noise: Spread,
    backbone: Model,
    batches: list[list[list[int]]],
    rows: int,
) -> ClpResult:
    assert found.histogram is not None
    speeds = [n / s for n, s in zip(found.tokens, found.seconds, strict=True)]
    plain_speeds = [n / s for n, s in zip(plain.tokens, plain.seconds, strict=True)]
    speedup = Spread(a / b for a, b in zip(speeds, plain_speeds, strict=True))
    length = acceptance_length(found.histogram)
    return ClpResult(
        way=way.name,
        rows=rows,
        tokens_a_step=length,
        step_ms=Spread(1000 * s / n for s, n in zip(found.seconds, found.steps, strict=True)),
        speedup=speedup,
        verified=way.verified,
        accuracy=acceptance_by_position(found.histogram) if way.verified and found.costs is None else None,
        quality=_quality(backbone, batches, found.outputs, plain.outputs),
        suspect=speedup.median > length * noise.high / noise.low,
        texts=[text for out in found.outputs for text in out.text],
    )


def _quality(
    backbone: Model, batches: list[list[list[int]]], outputs: list[Generation], plain: list[Generation]
) -> Quality:
    prompts = [prompt for batch in batches for prompt in batch]
    texts = [tokens for out in outputs for tokens in out.tokens]
    greedy = [tokens for out in plain for tokens in out.tokens]
    differences = [first_difference(a, b) for a, b in zip(greedy, texts, strict=True)]
    agreed = [len(text) if d is None else d for d, text in zip(differences, texts, strict=True)]
    return Quality(
        perplexity=perplexity(backbone.decoder, prompts, texts),
        repeated_3=_mean(repeated_share(text, 3) for text in texts),
        repeated_4=_mean(repeated_share(text, 4) for text in texts),
        distinct_1=_mean(1 - repeated_share(text, 1) for text in texts),
        distinct_2=_mean(1 - repeated_share(text, 2) for text in texts),
        agreed=statistics.mean(agreed),
        same=statistics.mean(d is None for d in differences),
    )


def _mean(values: Iterator[float]) -> float:
    """Of those texts that are long enough to tell."""
    told = [value for value in values if not math.isnan(value)]
    return statistics.mean(told) if told else math.nan


def perplexity(backbone: Decoder, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> float:
    """The backbone's perplexity of the texts after their prompts: exp of the mean nats a new token."""
    longest = max(len(p) + len(t) for p, t in zip(prompts, texts, strict=True))
    size = 1 << (longest - 1).bit_length()
    nats, count = 0.0, 0
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = np.zeros((1, size), np.int32)
        whole = [*prompt, *text]
        tokens[0, : len(whole)] = whole
        losses = np.asarray(_losses(backbone, jnp.asarray(tokens)))[0]
        nats += float(losses[len(prompt) - 1 : len(whole) - 1].sum())
        count += len(text)
    return math.exp(nats / max(count, 1))


@jax.jit
def _losses(backbone: Decoder, tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
    logits = backbone.logits(backbone.sequence(tokens)[:, :-1])
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked
