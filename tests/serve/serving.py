"""A real server on a free port, in a thread, over a model small enough to start in a test."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import httpx

from tests.engine.requests import CONTEXT, small_model
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.model import Model
from wmtp_jax.serve.options import ServeOptions
from wmtp_jax.serve.server import Server, listen
from wmtp_jax.serve.service import Service
from wmtp_jax.text.chat import ChatTemplate

NAME = "tiny"
ENGINE = EngineOptions(
    rows=3, context=CONTEXT, page_size=16, chunk=16, gamma=3, window=6, sink=2, steps=2, prefill_tokens=16
)


@cache
def chat_model() -> Model:
    """A tiny hybrid model with a vocabulary of characters and a chat template."""
    source = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }},{% endfor %}{{ ending or '' }}"
    return replace(small_model("hybrid"), chat_template=ChatTemplate(source=source))


class Serving(NamedTuple):
    """Where it listens, what serves, and how it is told to stop."""

    url: str
    service: Service
    server: Server
    thread: threading.Thread

    def stop(self) -> None:
        """As a signal does."""
        self.server.should_exit = True

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """A request with a body; the model's name is added."""
        return httpx.post(self.url + path, json={"model": NAME, **body}, timeout=120)


@contextlib.contextmanager
def serving(engine: EngineOptions = ENGINE, *, warm_up: bool = False, **options: Any) -> Iterator[Serving]:
    """Serves until the block is left."""
    given = ServeOptions(**{"port": 0, "name": NAME, "grace": 5.0, "engine": engine, **options})
    listening = listen(given.host, given.port)
    service = Service(chat_model(), given, warm_up=warm_up)
    server = Server(service)
    thread = threading.Thread(target=server.run, kwargs=dict(sockets=[listening]), daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield Serving(f"http://127.0.0.1:{listening.getsockname()[1]}", service, server, thread)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        service.close()
        listening.close()


def wait_until(condition: Any, seconds: float = 90.0) -> None:
    """Raises where something does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def assert_idle(running: Serving) -> None:
    """Soon nothing runs, and no page is held but by known prefixes."""
    core = running.service.engine._core
    wait_until(lambda: not core.running and not core.waiting and not running.service.engine._open)
    assert core.pool.free + core.prefixes.pages_alone() == core.pool.pages
