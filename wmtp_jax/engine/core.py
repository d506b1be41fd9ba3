"""Who reads, who decodes and who waits: one turn of the engine after the other, on one thread.

A turn lets waiting requests in, reads some chunks of prompts, and runs some steps of the loop for all rows that decode.
Requests come in by their arrival; pages are taken as a row grows, and where there are none left, known prefixes are
given up first, then the newest request gives up its slot and waits to be read again. The oldest is never sent away, so
every request comes to its end.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from functools import cached_property

import jax
import numpy as np

from wmtp_jax.decode.drafter import Proposing
from wmtp_jax.decode.loop import Emitted
from wmtp_jax.decode.sampling import MOST_LIKELY, Sampling
from wmtp_jax.engine.capped import can_rest
from wmtp_jax.engine.inputs import Inputs, gained
from wmtp_jax.engine.layout import layout
from wmtp_jax.engine.meter import EngineMeter
from wmtp_jax.engine.options import EngineOptions, request_options
from wmtp_jax.engine.pace import Kind, Pace
from wmtp_jax.engine.pages import PagePool
from wmtp_jax.engine.prefixes import Prefixes, page_keys
from wmtp_jax.engine.task import Gained, Listener, Task
from wmtp_jax.engine.warming import Warming
from wmtp_jax.errors import PromptTooLong, UserError
from wmtp_jax.generation.options import GenerateOptions, require_integer
from wmtp_jax.generation.prompts import Prompt, encode_prompts
from wmtp_jax.generation.rows import Row
from wmtp_jax.model import Model
from wmtp_jax.text.constraints import Constraint, GrammarFailed, Grammars, Matcher
from wmtp_jax.units import show_bytes

_log = logging.getLogger(__name__)


class StepFailed(RuntimeError):
    """A turn failed on the device; every request that was running is lost, those that waited are not."""


class Core:
    """The engine without its thread. ``turn`` does the work.

    ``make_task`` and ``room`` may be called from any thread, all else from one alone.

    ``drafter`` takes the place of ``gamma``, ``window`` and ``sink``.
    """

    def __init__(self, model: Model, options: EngineOptions, drafter: Proposing | None = None):
        self.model, self.options = model, options
        self._layout = layout(model, options, drafter)
        self._slots, self.page_size = self._layout.slots, self._layout.page_size
        self.drafter = self._slots.drafter
        self.meter = EngineMeter(self.drafter.gamma)
        self._pace = Pace() if options.rest and can_rest(self.drafter) else None
        self._inputs = Inputs(model.eos_ids, model.config.vocab_size)
        self._grammars = _grammars(model) if options.constraints else None
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []
        # On its way from one to the other.
        self._entering: Task | None = None
        self._arrivals = 0
        self._turns = 0
        try:
            self._start()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            needed = show_bytes(self._layout.nbytes)
            raise UserError(
                f"the engine's caches and states need {needed}, more than there is: lower rows, context or pages"
            ) from None
        self._observe()

    def _start(self) -> None:
        """Empty slots, an empty pool, no known prefix."""
        self.pool = PagePool(self._layout.pages)
        self.prefixes = Prefixes(self.pool, self.options.prefix_bytes)
        self._free_slots = list(range(self.options.rows - 1, -1, -1))
        self._state = self._layout.fresh()

    def device_bytes(self) -> int:
        """Of caches and states; the weights are the model's."""
        return sum(x.nbytes for x in jax.tree.leaves(self._state))

    def room(self, prompt: int) -> int:
        """New tokens that a request with so many prompt tokens can have, by this engine's context and the model's."""
        run = self.drafter.gamma + 1
        return max(0, self._limit - prompt - run)

    def require_short(self, text: str) -> None:
        """Raises PromptTooLong for a text that no way of cutting it into tokens makes short enough.

        Cutting a text of megabytes takes seconds, and this none.
        """
        if len(text) > self._longest_token * self._limit:
            raise PromptTooLong(
                f"the prompt's {len(text)} characters are too many for the {self._limit} tokens that this engine holds "
                "a request: shorten it"
            )

    @cached_property
    def _longest_token(self) -> int:
        """Characters, and some more: a text can become shorter before it is cut."""
        tokenizer = self.model.tokenizer
        return 1 if tokenizer is None else 4 * max(map(len, tokenizer.get_vocab()), default=1)

    @property
    def _limit(self) -> int:
        """Positions that one request can have: its own, of the pool if it had all of it, and the model's."""
        return self._layout.positions

    def make_task(
        self,
        prompt: Prompt,
        listener: Listener,
        *,
        gamma: int | None = None,
        logprobs: int | None = None,
        constraint: Constraint | None = None,
        **given: object,
    ) -> Task:
        """A request, checked. Raises UserError for a bad prompt, a bad option, and what can never fit."""
        options = request_options(given)
        if logprobs is not None:
            require_integer("logprobs", logprobs, 0, min(MOST_LIKELY, self.model.config.vocab_size))
        most = self.drafter.gamma if gamma is None else gamma
        require_integer("gamma", most, 0, self.drafter.gamma)
        if options.stop_strings and self.model.tokenizer is None:
            raise UserError("stop strings need text, and this checkpoint has no tokenizer", field="stop")
        run = self.drafter.gamma + 1
        if isinstance(prompt, str):
            self.require_short(prompt)
        ids = encode_prompts(self.model, prompt, new_positions=None)
        if len(ids) != 1:
            raise UserError(f"a request has one prompt, not {len(ids)}: submit each on its own")
        need = len(ids[0]) + options.max_new_tokens + run
        limit = self._limit
        if need > limit:
            raise PromptTooLong(
                f"the prompt's {len(ids[0])} tokens, {options.max_new_tokens} new ones and {run} for drafts are "
                f"{need}, and this engine holds {limit} a request: shorten the prompt or lower max_new_tokens"
            )
        (sampling,) = options.row_sampling(1)
        row = Row(0, ids[0], self.model, options)
        matcher = None if constraint is None else self._matcher(constraint, options)
        return Task(ids[0], options, sampling, most, need, row, listener, logprobs, matcher)

    def _matcher(self, constraint: Constraint, options: GenerateOptions) -> Matcher:
        if self._grammars is None:
            message = "constraint: this engine was set up without; give it EngineOptions(constraints=True)"
            raise UserError(message, field="constraint")
        if options.ignore_eos:
            message = "ignore_eos: a constrained text ends where its constraint does; leave it out"
            raise UserError(message, field="ignore_eos")
        return self._grammars.matcher(constraint)

    def add(self, task: Task) -> None:
        """Puts a request at the end of the queue."""
        self._arrivals += 1
        task.arrival = self._arrivals
        if not task.options.max_new_tokens:
            task.row.finished = "length"
            task.take(Gained([], []))
            return
        self._wait(task)
        self.waiting.append(task)

    def _wait(self, task: Task) -> None:
        task.to_read = [*task.prompt, *task.emitted[:-1]]
        task.keys = page_keys(task.to_read, self.page_size)

    def cancel(self, task: Task) -> bool:
        """Lets a request go, whatever it is at; its pages are free at once. False where it is gone already."""
        if task in self.waiting:
            self.waiting.remove(task)
        elif task in self.running:
            self._leave(task)
        else:
            return False
        return True

    def cut_short(self, task: Task) -> None:
        """Ends a request with what it has."""
        if self.cancel(task):
            task.listener(task.row.cut_short(), None)

    def turn(self) -> bool:
        """Some work; whether there is more. Raises StepFailed, after which the engine is empty and usable."""
        failure = self._try()
        if failure is not None:
            self._recover(failure)
        self._observe()
        if failure is not None:
            raise StepFailed(failure)
        self._turns += 1
        return bool(self.waiting or self.running)

    def _observe(self) -> None:
        self.meter.observe(len(self.waiting), len(self.running), self.pool)

    def _try(self) -> str | None:
        """One turn; what failed, in a line. The error itself is let go: its frames hold the device's arrays."""
        try:
            self._admit()
            self._prefill()
            self._decode()
        except Exception as error:
            _log.exception("a turn of the engine failed")
            return f"the engine's step failed: {type(error).__name__}: {error}"
        return None

    def _recover(self, failure: str) -> None:
        """Tells those that were in, and starts with empty arrays; the old ones were given to what failed."""
        lost = self.running if self._entering is None else [*self.running, self._entering]
        self.running, self._entering = [], None
        # Before new ones are made: the memory may not hold both.
        del self._state
        for task in lost:
            task.slot, task.pages = None, []
            task.listener(None, StepFailed(failure))
        self._start()

    def warm_up(self) -> None:
        """Compiles every program that a request can need. No request may be running."""
        assert not self.running, "only an idle engine can warm up"
        constrained, rests = self._grammars is not None, self._pace is not None
        warming = Warming(
            layout=self._layout, inputs=self._inputs, options=self.options, constrained=constrained, rests=rests
        )
        self._state = warming.warmed(self._state)

    def _admit(self) -> None:
        while self.waiting and self._free_slots:
            self._entering = self.waiting.popleft()
            if not self._enter(self._entering):
                self.waiting.appendleft(self._entering)
                break
        self._entering = None

    def _enter(self, task: Task) -> bool:
        """Gives a request a slot and pages for all that it has to read, if there are enough."""
        found = self.prefixes.find(task.keys)
        shared = [] if found is None else found.pages
        wanted = self._pages_for(len(task.to_read) + 1, task) - len(shared)
        # Those who are in will grow: without a page to spare for each, the newcomer would soon be sent out again.
        growing = sum(len(other.pages) < self._pages_for(other.need, other) for other in self.running)
        if not self._make_room(wanted + growing):
            self.pool.release(shared)
            return False
        task.pages = [*shared, *self.pool.take(wanted)]
        task.slot = self._free_slots.pop()
        task.read, task.reading = len(shared) * self.page_size, True
        self._state = self._slots.clear(self._state, task.slot, task.gamma)
        if found is not None:
            following = task.to_read[task.read]
            self._state = self._slots.restore(self._state, task.slot, task.read, found.kept, following)
            self.meter.reused_tokens += task.read
        if task.reused is None:
            # Later the beginning that is found may be its own.
            task.reused = task.read
        if task.sampling.penalizes:
            self._state = self._slots.remember(self._state, task.slot, task.prompt, task.emitted[:-1])
        self.running.append(task)
        self.meter.most_running = max(self.meter.most_running, len(self.running))
        self._entering = None
        return True

    def _pages_for(self, positions: int, task: Task) -> int:
        return -(-min(positions, task.need) // self.page_size)

    def _make_room(self, pages: int) -> bool:
        """Gives up known prefixes until so many pages are free, if that can be."""
        if self.pool.free < pages and self.pool.free + self.prefixes.pages_alone() < pages:
            return False
        while self.pool.free < pages:
            self.prefixes.evict()
        return True

    def _leave(self, task: Task) -> None:
        """Takes a request's slot and pages back."""
        assert task.slot is not None
        self.running.remove(task)
        self._free_slots.append(task.slot)
        self.pool.release(task.pages)
        task.slot, task.pages, task.read, task.reading = None, [], 0, False

    def _prefill(self) -> None:
        """Prompt chunks, ``prefill_tokens`` of them: by turns of the request with the least left, and of the oldest."""
        budget = self.options.prefill_tokens
        while budget > 0:
            readers = [task for task in self.running if task.reading]
            if not readers:
                return
            first = self._turns % 2 == 0 or len(readers) == 1
            task = min(readers, key=lambda t: (len(t.to_read) - t.read, t.arrival) if first else (t.arrival, 0))
            budget -= self._prefill_chunk(task)
            # Dispatched chunks cannot be overtaken: a request that comes now must not find a row of them before it.
            jax.block_until_ready(self._state.length)

    def _prefill_chunk(self, task: Task) -> int:
        """Reads one chunk, and returns the tokens that its program has room for."""
        assert task.slot is not None
        self._state = self._slots.read(self._state, task.slot, self._table(task), task.to_read, task.read)
        left = len(task.to_read) - task.read
        chunk = self._slots.chunk_for(left)
        taken = min(chunk, left)
        task.read += taken
        pages = task.read // self.page_size
        if task.read % self.page_size == 0 and pages <= len(task.keys):
            slot = task.slot
            self.prefixes.add(task.keys[pages - 1], task.pages[:pages], lambda: self._slots.keep(self._state, slot))
        if task.read == len(task.to_read):
            self._begin(task)
        self.meter.prefill_tokens += taken
        return chunk

    def _begin(self, task: Task) -> None:
        """The first token after what was read. One that is known already is not emitted again."""
        assert task.slot is not None
        known = task.known
        remaining = task.options.max_new_tokens - max(len(task.emitted) - 1, 0)
        sampling, stops = self._inputs.sampling([task], 1), self._inputs.stops([task], 1)
        allowed = self._inputs.first_allowed(plain=task.plain)
        if known is None and task.matcher is not None:
            try:
                allowed = task.matcher.allowed()[0]
            except GrammarFailed as error:
                self._fail(task, error)
                return
        self._state, token, likely = self._slots.begin(
            self._state, task.slot, remaining, sampling, stops, known, allowed
        )
        task.reading = False
        if known is None:
            own = None if likely is None else jax.tree.map(lambda x: x[0], likely)
            self._hand_over(task, Gained([token], [False], own))

    def _hand_over(self, task: Task, gained: Gained) -> None:
        before = len(task.emitted)
        try:
            task.take(gained)
        except GrammarFailed as error:
            self._fail(task, error)
            return
        self.meter.output_tokens += len(task.emitted) - before
        if task.row.finished:
            self.meter.finished += 1
            self._leave(task)

    def _fail(self, task: Task, error: Exception) -> None:
        """Ends one request and nothing else."""
        self._leave(task)
        task.listener(None, error)

    def _decode(self) -> None:
        """Some steps for every row that decodes and has, or gets, pages for them."""
        span = self.options.steps * (self.drafter.gamma + 1) + self.drafter.gamma
        for task in sorted((t for t in self.running if not t.reading), key=lambda t: t.arrival):
            if task.slot is not None:
                self._grow(task, task.length + span)
        tasks = [task for task in self.running if not task.reading]
        if not tasks:
            return
        bucket = min(1 << (len(tasks) - 1).bit_length(), self.options.rows)
        slots = [task.slot for task in tasks if task.slot is not None]
        slots += [self.options.rows] * (bucket - len(slots))
        tables = np.stack([self._table(task) for task in tasks] + [self._table(tasks[0])] * (bucket - len(tasks)))
        sampling, stops = self._inputs.sampling(tasks, bucket), self._inputs.stops(tasks, bucket)
        if any(task.matcher is not None for task in tasks):
            self._state, drafts = self._slots.propose(self._state, slots, tables, sampling)
            allowed = self._allowed(tasks, drafts)
            self._state, emitted = self._slots.verify(self._state, slots, tables, drafts, allowed, sampling, stops)
            self.meter.add(emitted, drafting=True)
        else:
            emitted = self._run(tasks, slots, tables, sampling, stops)
        for row, (task, count) in enumerate(zip(tasks, emitted.count.tolist(), strict=False)):
            # One whose constraint failed has left.
            if task.slot is not None:
                self._hand_over(task, gained(emitted, row, count))

    def _run(
        self, tasks: Sequence[Task], slots: list[int], tables: np.ndarray, sampling: Sampling, stops: np.ndarray
    ) -> Emitted:
        """Some steps of the loop, with drafts unless they do not pay."""
        kind = Kind(len(slots), plain=all(task.plain for task in tasks))
        drafting = self._pace is None or (any(task.gamma for task in tasks) and self._pace.drafts(kind))
        begin = time.perf_counter()
        self._state, emitted = self._slots.run(
            self._state, slots, tables, sampling, stops, self.options.steps, drafting=drafting
        )
        if self._pace is not None:
            self._pace.took(
                kind,
                drafting=drafting,
                seconds=time.perf_counter() - begin,
                steps=int(emitted.steps),
                tokens=int(emitted.count.sum()),
                row_steps=int(emitted.accepted.sum()),
            )
        self.meter.add(emitted, drafting=drafting)
        return emitted

    def _allowed(self, tasks: Sequence[Task], drafts: np.ndarray) -> np.ndarray:
        """What each row may write after its pending token and after each draft: bits [b, gamma + 1, W]."""
        allowed = self._inputs.allowed(len(drafts), drafts.shape[1] + 1)
        for row, task in enumerate(tasks):
            if task.matcher is not None:
                try:
                    allowed[row] = task.matcher.allowed(drafts[row].tolist())
                except GrammarFailed as error:
                    self._fail(task, error)
        return allowed

    def _grow(self, task: Task, positions: int) -> None:
        """Pages for so many positions, or for all that it can need; at the newest request's cost if there are none."""
        missing = self._pages_for(positions, task) - len(task.pages)
        while missing > 0 and not self._make_room(missing):
            newest = max(self.running, key=lambda t: t.arrival)
            self._preempt(newest)
            if newest is task:
                return
        if missing > 0:
            task.pages += self.pool.take(missing)

    def _preempt(self, task: Task) -> None:
        self._leave(task)
        self._wait(task)
        # Those that are in came before all that wait, and the newest of them goes first.
        self.waiting.appendleft(task)
        self.meter.preempted += 1

    def _table(self, task: Task) -> np.ndarray:
        """The slot's pages in order. Entries past them are read masked and never written; they repeat the last."""
        return np.array(task.pages + task.pages[-1:] * (self._layout.row_pages - len(task.pages)), np.int32)


def _grammars(model: Model) -> Grammars:
    if model.tokenizer is None:
        raise UserError("constraints need text, and this checkpoint has no tokenizer")
    return Grammars(model.tokenizer, model.config.vocab_size, model.eos_ids)
