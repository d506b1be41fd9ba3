"""The engine for users: requests from any thread or event loop, each an iterator of its events."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from wmtp_jax.decode.drafter import Proposing
from wmtp_jax.engine.core import Core, StepFailed
from wmtp_jax.engine.meter import EngineMeter
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.engine.task import Task
from wmtp_jax.errors import UserError
from wmtp_jax.generation.prompts import Prompt
from wmtp_jax.generation.rows import Event, Finished
from wmtp_jax.model import Model


class QueueFull(UserError):
    """More requests wait than the engine takes; later there is room again."""


class EngineClosed(RuntimeError):
    """The engine was closed before the request came to its end."""


class Running(Iterator[Event], AsyncIterator[Event]):
    """A submitted request: its events, for a ``for`` or an ``async for`` loop; one loop over each request.

    The last event says how it finished. Iterating raises StepFailed where the engine lost the request, and EngineClosed
    where it was closed.
    """

    def __init__(self, task: Task, cancel: Callable[[Task], None]):
        self._task = task
        self._cancel = cancel
        self._items: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._ended = False

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return list(self._task.row.tokens)

    @property
    def prompt_tokens(self) -> int:
        """How many its prompt has."""
        return len(self._task.prompt)

    @property
    def reused_tokens(self) -> int:
        """How many of those an earlier request had read."""
        return self._task.reused or 0

    @property
    def text(self) -> str:
        """All text so far."""
        return self._task.row.text

    @property
    def finished(self) -> Finished | None:
        """Why it ended, None before."""
        return self._task.row.finished

    def cancel(self) -> None:
        """Ends the request soon; what it holds is freed, and iterating ends without another event."""
        self._cancel(self._task)

    def put(self, event: Event | None, error: Exception | None) -> None:
        """Called by the engine's thread with what happened; with neither, the request was cancelled."""
        self._items.put(event or error or StopIteration())
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:
                # The event loop is closed: nobody waits any more.
                self.cancel()

    def __iter__(self) -> "Running":
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        return self._taken(self._items.get())

    def __aiter__(self) -> "Running":
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        while True:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                await self._something()
                continue
            try:
                return self._taken(item)
            except StopIteration:
                raise StopAsyncIteration from None

    async def _something(self) -> None:
        """Waits until there is an item."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiter = loop, future
        # One that came before the waiter was set has woken nobody.
        if self._items.empty():
            await future

    def _taken(self, item: Event | Exception) -> Event:
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finished is not None
        return item


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class Engine:
    """Decodes many requests at once on a thread of its own.

    As a context manager it lets requests come to their end; left by an exception, it ends them.

    ``warm_up`` compiles everything before the first request, which otherwise waits for it. ``drafter`` takes the place
    of the options' gamma, window and sink.
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions | None = None,
        *,
        warm_up: bool = True,
        drafter: Proposing | None = None,
    ):
        self._core = Core(model, options or EngineOptions(), drafter)
        if warm_up:
            self._core.warm_up()
        self._commands: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        # All that were submitted and have not ended.
        self._open: dict[Task, Running] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="wmtp-engine", daemon=True)
        self._thread.start()

    @property
    def meter(self) -> EngineMeter:
        """What was counted so far."""
        return self._core.meter

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and not self._closing

    @property
    def gamma(self) -> int:
        """Drafts a step."""
        return self._core.drafter.gamma

    def room(self, prompt: int) -> int:
        """New tokens that a request with so many prompt tokens can have."""
        return self._core.room(prompt)

    def require_short(self, text: str) -> None:
        """Raises PromptTooLong for a text that cannot fit, without cutting it into tokens."""
        self._core.require_short(text)

    def encode(self, text: str) -> list[int]:
        """A text's token ids. Raises PromptTooLong for one that cannot fit."""
        self._core.require_short(text)
        return self._core.model.encode(text)

    def submit(self, prompt: Prompt, **options: Any) -> Running:
        """A request: text or token ids, and the options of ``REQUEST_FIELDS``, each as in ``wmtp_jax.generate``.

        ``gamma`` is at most the engine's; ``logprobs`` so many of the likeliest tokens to tell at each position;
        ``constraint`` what the text must fit. Raises UserError for what is wrong, QueueFull, and EngineClosed.
        """
        return self.start(self.prepare(prompt, **options))

    def prepare(self, prompt: Prompt, **options: Any) -> Task:
        """The first half of ``submit``, which can take long (tokens of a text, a grammar) and holds nothing."""
        task = self._core.make_task(prompt, lambda event, error: self._tell(task, event, error), **options)
        return task

    def start(self, task: Task) -> Running:
        """The second half, which takes no time."""
        running = Running(task, self._cancel)
        with self._changed:
            if self._closing:
                raise EngineClosed("the engine is closed")
            room = self._core.options.rows + self._core.options.queue
            if len(self._open) >= room:
                raise QueueFull(f"{len(self._open)} requests are running or waiting, and the engine takes {room}")
            self._open[task] = running
            self._commands.append(lambda: self._core.add(task))
            self._changed.notify()
        return running

    def _tell(self, task: Task, event: Event | None, error: Exception | None) -> None:
        running = self._open[task]
        if event is None or event.finished:
            with self._changed:
                del self._open[task]
        running.put(event, error)

    def close(self, *, finish: bool = True) -> None:
        """Takes no more requests and waits for those that are in, or with ``finish=False`` ends them now."""
        with self._changed:
            self._closing = True
            if not finish:
                self._commands.append(self._end_all)
            self._changed.notify()
        self._thread.join()

    def cut_short(self) -> None:
        """Takes no more requests, and soon ends those that are in with what they have.

        Those that have nothing yet end with EngineClosed.
        """
        with self._changed:
            self._closing = True
            self._commands.append(self._cut_all)
            self._changed.notify()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(finish=kind is None)

    def _cancel(self, task: Task) -> None:
        def now() -> None:
            if self._core.cancel(task):
                task.listener(None, None)

        with self._changed:
            self._commands.append(now)
            self._changed.notify()

    def _end_all(self) -> None:
        for task in [*self._core.running, *self._core.waiting]:
            self._core.cancel(task)
            task.listener(None, EngineClosed("the engine was closed"))

    def _cut_all(self) -> None:
        for task in [*self._core.running, *self._core.waiting]:
            if task.emitted:
                self._core.cut_short(task)
            else:
                self._core.cancel(task)
                task.listener(None, EngineClosed("the engine was closed"))

    def _work(self) -> None:
        try:
            self._turns()
        except BaseException as error:
            # Nobody may wait for a thread that is gone.
            with self._changed:
                self._closing = True
                left = list(self._open)
            for task in left:
                self._tell(task, None, EngineClosed(f"the engine's thread ended: {type(error).__name__}: {error}"))
            raise

    def _turns(self) -> None:
        busy = False
        while True:
            with self._changed:
                while not (self._commands or busy or self._closing):
                    self._changed.wait()
                commands, self._commands = self._commands, []
                if self._closing and not commands and not busy:
                    return
            for command in commands:
                command()
            try:
                busy = self._core.turn()
            except StepFailed:
                busy = bool(self._core.waiting)
