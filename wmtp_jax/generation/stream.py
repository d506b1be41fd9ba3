"""Drives the loop for a batch of prompts and reads what it emits every few steps."""

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wmtp_jax.clp.adaptive import Adaptive, with_costs
from wmtp_jax.decode.loop import Emitted, decode
from wmtp_jax.decode.prefill import prefill, start_state
from wmtp_jax.decode.sampling import batch_sampling
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.errors import UserError
from wmtp_jax.generation.drafting import checked_costs, make_drafter
from wmtp_jax.generation.options import GenerateOptions
from wmtp_jax.generation.prompts import Prompts, encode_prompts
from wmtp_jax.generation.rows import Event, Finished, Row
from wmtp_jax.generation.stats import Meter, Stats
from wmtp_jax.model import Model
from wmtp_jax.models.parameters import pack

# Of each number of drafts, twice over.
_MEASURED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Each row's new tokens, text and reason to end, in the prompts' order.

    ``tokens`` end with the end-of-text token where one was emitted, and with the token that completed a stop string
    where one was; ``text`` holds neither. Without a tokenizer the texts are empty.
    """

    tokens: list[list[int]]
    text: list[str]
    finished: list[Finished]
    stats: Stats


def generate(model: Model, prompts: Prompts, **options: Any) -> Generation:
    """New text for one prompt or several: strings, or token ids.

    ``options`` are the fields of ``GenerateOptions``. Raises UserError for bad prompts and bad options.
    """
    running = stream(model, prompts, **options)
    for _ in running:
        pass
    return running.generation()


def stream(model: Model, prompts: Prompts, **options: Any) -> "Stream":
    """The same, as events while the text is made. Prompts and options are checked at once."""
    return Stream(model, prompts, GenerateOptions(**options))


class Stream(Iterator[Event]):
    """An iterator of events, which can say at any time what has come so far."""

    def __init__(self, model: Model, prompts: Prompts, options: GenerateOptions):
        self._model = model
        self._packed = pack(model.decoder)
        self._options = options
        self._drafter = make_drafter(model, options)
        self._prompts = encode_prompts(model, prompts, new_positions=options.max_new_tokens + self._drafter.gamma)
        rows = len(self._prompts)
        self._sampling = batch_sampling(options.row_sampling(rows))
        if options.stop_strings and model.tokenizer is None:
            raise UserError("stop strings need text, and this checkpoint has no tokenizer")
        self._rows = [Row(index, prompt, model, options) for index, prompt in enumerate(self._prompts)]
        self._meter = Meter(prompt_tokens=sum(map(len, self._prompts)), rows=rows, gamma=self._drafter.gamma)
        self._events = self._run()

    def __next__(self) -> Event:
        return next(self._events)

    def generation(self) -> Generation:
        """What has come so far. A row that has not ended yet counts as ended by length."""
        return Generation(
            tokens=[row.tokens for row in self._rows],
            text=[row.text for row in self._rows],
            finished=[row.finished or "length" for row in self._rows],
            stats=self._meter.stats(sum(len(row.tokens) for row in self._rows)),
        )

    def _run(self) -> Iterator[Event]:
        if not self._options.max_new_tokens:
            for row in self._rows:
                row.finished = "length"
                yield row.take([])
            return
        begin = time.perf_counter()
        stops = self._stop_ids()
        state = self._prefill(self._start(), stops)
        first = jax.device_get(state.pending).tolist()
        self._meter.first_token_seconds = time.perf_counter() - begin
        for row, token in zip(self._rows, first, strict=True):
            yield row.take([token])
        if not self._all_finished():
            state = self._compile(state, stops)
            if isinstance(self._drafter, Adaptive):
                state = yield from self._learn_costs(state, stops)
            yield from self._read_steps(state, stops)

    def _learn_costs(self, state: DecodeState, stops: jax.Array) -> Generator[Event, None, DecodeState]:
        """Measures steps with every number of drafts, unless they are given. The steps are real ones: nothing is lost.

        The least of the times counts, since whatever else runs on a machine only adds.
        """
        numbers = range(self._drafter.gamma + 1)
        if self._options.step_costs is not None:
            return with_costs(state, checked_costs(self._options.step_costs, len(numbers)))
        best = [math.inf for _ in numbers]
        for forced in [*numbers, *numbers]:
            state = with_costs(state, jnp.ones(len(numbers)), forced)
            begin = time.perf_counter()
            state, emitted = self._decode(state, stops, limit=_MEASURED_STEPS)
            seconds = time.perf_counter() - begin
            self._meter.add_read(seconds, emitted)
            if emitted.steps:
                best[forced] = min(best[forced], 1000 * seconds / int(emitted.steps))
            yield from self._take(emitted)
            if self._all_finished():
                break
        if max(best) < math.inf:
            self._meter.step_costs = best
        return with_costs(self._with_finished_rows(state), jnp.asarray(best))

    def _read_steps(self, state: DecodeState, stops: jax.Array) -> Iterator[Event]:
        while not self._all_finished():
            begin = time.perf_counter()
            state, emitted = self._decode(state, stops)
            self._meter.add_read(time.perf_counter() - begin, emitted)
            if not emitted.steps:
                raise RuntimeError("the loop counts every row as done, but its reader does not")
            events = self._take(emitted)
            yield from events
            if any(event.finished == "stop string" for event in events):
                state = self._with_finished_rows(state)

    def _take(self, emitted: Emitted) -> list[Event]:
        """Gives every row that goes on what it emitted."""
        return [
            row.take(tokens[:count])
            for row, tokens, count in zip(self._rows, emitted.tokens.tolist(), emitted.count.tolist(), strict=True)
            if count and not row.finished
        ]

    def _start(self) -> DecodeState:
        model, options, meter = self._model.decoder, self._options, self._meter
        state = start_state(
            model,
            self._drafter,
            self._prompts,
            [options.max_new_tokens] * len(self._rows),
            page_size=options.page_size,
            dtype=jnp.dtype(options.cache_dtype or model.embedding.dtype),
            penalized=self._sampling.penalized,
        )
        meter.target_cache_bytes = _nbytes(state.cache) - state.cache.table.nbytes
        meter.draft_cache_bytes = _nbytes(state.draft)
        meter.recurrent_state_bytes = _nbytes(state.recurrent)
        return state

    def _prefill(self, state: DecodeState, stops: jax.Array) -> DecodeState:
        begin = time.perf_counter()
        state = prefill(
            self._model.decoder,
            self._drafter,
            state,
            self._prompts,
            self._sampling,
            stops,
            chunk=self._options.chunk,
            progress=self._options.on_progress,
        )
        jax.block_until_ready(state.pending)
        self._meter.prefill_seconds = time.perf_counter() - begin
        return state

    def _compile(self, state: DecodeState, stops: jax.Array) -> DecodeState:
        """Calls the loop with every row done: it compiles and runs no step, so that measured steps are only steps."""
        begin = time.perf_counter()
        state, _ = self._decode(_with_done(state, [True] * len(self._rows)), stops)
        self._meter.compile_seconds = time.perf_counter() - begin
        return self._with_finished_rows(state)

    def _decode(self, state: DecodeState, stops: jax.Array, limit: int | None = None) -> tuple[DecodeState, Emitted]:
        """Some steps, and what they emitted as host arrays."""
        steps = self._options.steps_per_read
        most = np.int32(steps if limit is None else min(limit, steps))
        state, emitted = decode(self._packed, self._drafter, state, self._sampling, stops, steps, most)
        return state, jax.device_get(emitted)

    def _with_finished_rows(self, state: DecodeState) -> DecodeState:
        """Only the reader knows which rows a stop string has ended."""
        return _with_done(state, [row.finished is not None for row in self._rows])

    def _all_finished(self) -> bool:
        return all(row.finished for row in self._rows)

    def _stop_ids(self) -> jax.Array:
        # No token has a negative id: ignored ends keep their shape, so that both ways share one program.
        eos = [-1 if self._options.ignore_eos else token for token in self._model.eos_ids]
        return jax.device_put(np.tile(np.array(eos, np.int32), (len(self._rows), 1)))


def _with_done(state: DecodeState, done: list[bool]) -> DecodeState:
    return replace(state, done=jax.device_put(np.array(done)))


def _nbytes(arrays: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(arrays))
