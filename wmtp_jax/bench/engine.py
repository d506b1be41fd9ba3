"""What the engine gains from many requests at once, and how long a short one waits beside a long prompt."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from wmtp_jax.bench.options import EngineBenchOptions
from wmtp_jax.bench.texts import long_documents, prompt_ends
from wmtp_jax.bench.timing import Spread
from wmtp_jax.engine.engine import Engine
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.errors import UserError
from wmtp_jax.model import Model
from wmtp_jax.text.documents import read_texts

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """So many clients, each with one request after the other; a value a round.

    ``first_token_ms`` and ``token_ms`` are medians over requests: until the first token, and between later ones.
    """

    clients: int
    tokens_per_second: Spread
    first_token_ms: Spread
    token_ms: Spread
    acceptance_length: float


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """Milliseconds until a short request's first token: alone, and while a prompt of ``long`` tokens is read."""

    short: int
    long: int
    idle_ms: Spread
    beside_ms: Spread
    # Of the long prompt, alone: until its first token, by the number of its chunks.
    chunk_ms: float


@dataclass
class _Round:
    """What the clients of one round saw."""

    first_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    tokens: int = 0


def require_positions(model: Model, options: EngineBenchOptions) -> None:
    """Raises UserError, before anything is measured, for prompts that are too long for the model."""
    limit = model.config.max_positions - options.new_tokens - options.gamma
    for name in ("prompt", "long"):
        if getattr(options, name) > limit:
            raise UserError(f"--{name} {getattr(options, name)}: this model takes prompts of up to {limit} tokens here")


def measure_throughput(model: Model, text: Path | None, options: EngineBenchOptions, note: Note) -> list[Throughput]:
    """All numbers of clients in every round. Prompts differ, and no beginning is kept: nothing is read for free."""
    prompts = _prompts(model, text, options.prompt, options.requests)
    context = options.prompt + options.new_tokens + options.gamma + 1
    given = EngineOptions(
        rows=max(options.clients),
        context=context,
        gamma=options.gamma,
        rest=options.rest,
        window=options.window,
        sink=options.sink,
        prefix_bytes=0,
    )
    note(f"compiling for up to {given.rows} rows of {context} positions")
    found = {clients: ([], [], [], []) for clients in options.clients}
    with Engine(model, given) as engine:
        for turn in range(options.repeats):
            for clients in options.clients:
                note(f"round {turn + 1} of {options.repeats}, {clients} clients")
                steps, emitted = engine.meter.histogram.sum(), engine.meter.emitted_tokens
                begin = time.perf_counter()
                seen = _round(engine, prompts, clients, options.new_tokens)
                seconds = time.perf_counter() - begin
                speeds, firsts, tokens, lengths = found[clients]
                speeds.append(seen.tokens / seconds)
                firsts.append(1000 * statistics.median(seen.first_seconds))
                tokens.append(1000 * statistics.median(seen.token_seconds))
                steps = engine.meter.histogram.sum() - steps
                lengths.append((engine.meter.emitted_tokens - emitted) / steps)
    return [
        Throughput(
            clients=clients,
            tokens_per_second=Spread(speeds),
            first_token_ms=Spread(firsts),
            token_ms=Spread(tokens),
            acceptance_length=statistics.mean(lengths),
        )
        for clients, (speeds, firsts, tokens, lengths) in found.items()
    ]


def _round(engine: Engine, prompts: Sequence[list[int]], clients: int, new_tokens: int) -> _Round:
    """Every prompt once, spread over so many clients."""
    seen, lock, waiting = _Round(), threading.Lock(), list(reversed(prompts))

    def client() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                prompt = waiting.pop()
            begin = time.perf_counter()
            running, first = engine.submit(prompt, max_new_tokens=new_tokens, ignore_eos=True), None
            for _ in running:
                first = first or time.perf_counter()
            end = time.perf_counter()
            assert first is not None
            with lock:
                seen.first_seconds.append(first - begin)
                seen.token_seconds.append((end - first) / (new_tokens - 1))
                seen.tokens += new_tokens

    with ThreadPoolExecutor(clients) as pool:
        for ended in [pool.submit(client) for _ in range(clients)]:
            ended.result()
    return seen


def measure_first_token(model: Model, text: Path | None, options: EngineBenchOptions, note: Note) -> FirstToken:
    """A short request alone, and again while a long prompt is being read; a value a round."""
    long = _prompts(model, text, options.long, options.repeats + 1)
    short = _prompts(model, text, options.prompt, 2 * options.repeats + 1)
    given = EngineOptions(
        rows=2,
        context=options.long + options.new_tokens + options.gamma + 1,
        gamma=options.gamma,
        rest=options.rest,
        window=options.window,
        sink=options.sink,
        prefix_bytes=0,
    )
    idle, beside = Spread(), Spread()
    with Engine(model, given) as engine:
        note(f"a prompt of {options.long} tokens, alone")
        seconds = _first_seconds(engine, long[-1])
        _first_seconds(engine, short[-1])
        for turn in range(options.repeats):
            note(f"round {turn + 1} of {options.repeats}: short prompts, alone and beside a long one")
            idle.append(1000 * _first_seconds(engine, short[2 * turn]))
            reading = engine.submit(long[turn], max_new_tokens=2, ignore_eos=True)
            # Some chunks later: not at the long prompt's beginning.
            time.sleep(seconds / 8)
            beside.append(1000 * _first_seconds(engine, short[2 * turn + 1]))
            if reading.tokens:
                raise UserError(
                    f"--long {options.long}: was read before the short prompt's first token; give a longer one"
                )
            reading.cancel()
            list(reading)
    chunks = -(-options.long // given.chunk)
    return FirstToken(
        short=options.prompt, long=options.long, idle_ms=idle, beside_ms=beside, chunk_ms=1000 * seconds / chunks
    )


def _first_seconds(engine: Engine, prompt: list[int]) -> float:
    begin = time.perf_counter()
    running = engine.submit(prompt, max_new_tokens=2, ignore_eos=True)
    next(running)
    seconds = time.perf_counter() - begin
    list(running)
    return seconds


def _prompts(model: Model, text: Path | None, tokens: int, count: int) -> list[list[int]]:
    """Prompts of so many tokens that end at different places of the text."""
    documents = long_documents([model.encode(document) for document in read_texts(text)], tokens)
    ends = prompt_ends([len(ids) for ids in documents], tokens, count)
    found = [documents[document][end - tokens : end] for document, end in ends]
    return [found[index % len(found)] for index in range(count)]
