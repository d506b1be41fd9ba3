"""The engine on its thread: many callers, event loops, cancellation, failure, closing."""

import asyncio
import threading

import jax
import pytest

import wmtp_jax as wmtp
from tests.clp.backbones import with_random_heads
from tests.engine.requests import CONTEXT, ENGINES, small_model
from wmtp_jax.engine.core import Core, StepFailed
from wmtp_jax.engine.engine import Engine, EngineClosed, QueueFull, Running
from wmtp_jax.engine.layout import Layout
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.engine.slots import Slots
from wmtp_jax.errors import PromptTooLong
from wmtp_jax.model import Model

PROMPTS = [[1 + i, 2, 3, *range(i)] for i in range(12)]


def make_engine(**changes) -> Engine:
    name, options = ENGINES["roomy"]
    return Engine(small_model(name), EngineOptions(**{**options, "context": CONTEXT, **changes}), warm_up=False)


@pytest.fixture(scope="module")
def expected():
    out = wmtp.generate(small_model("hybrid"), PROMPTS, gamma=0, max_new_tokens=14, ignore_eos=True)
    return out.tokens


def test_many_threads_get_what_they_asked_for(expected):
    got: dict[int, list[int]] = {}
    with make_engine() as engine:

        def ask(index: int) -> None:
            running = engine.submit(PROMPTS[index], max_new_tokens=14, ignore_eos=True)
            got[index] = [token for event in running for token in event.tokens]
            assert running.finished == "length"
            assert running.tokens == got[index]

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [got[index] for index in range(len(PROMPTS))] == expected


def test_an_event_loop_gets_them_too(expected):
    async def ask(engine: Engine, prompt: list[int]) -> list[int]:
        running = engine.submit(prompt, max_new_tokens=14, ignore_eos=True)
        return [token async for event in running for token in event.tokens]

    async def everyone() -> list[list[int]]:
        with make_engine() as engine:
            return await asyncio.gather(*(ask(engine, prompt) for prompt in PROMPTS))

    assert asyncio.run(everyone()) == expected


def test_a_cancelled_request_ends_without_another_word(expected):
    with make_engine(steps=1, gamma=0) as engine:
        running = engine.submit(PROMPTS[0], max_new_tokens=40, ignore_eos=True)
        other = engine.submit(PROMPTS[1], max_new_tokens=14, ignore_eos=True)
        next(running)
        running.cancel()
        rest = list(running)
        assert running.finished is None
        assert len(rest) < 39
        assert list(running) == []
        assert [token for event in other for token in event.tokens] == expected[1]
        running.cancel()


def test_a_failed_step_is_told_and_the_engine_goes_on(expected, monkeypatch):
    run, calls = Slots.run, []

    def fail_once(*arguments, **given):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return run(*arguments, **given)

    monkeypatch.setattr(Slots, "run", fail_once)
    with make_engine() as engine:
        with pytest.raises(StepFailed, match="RuntimeError: no memory"):
            list(engine.submit(PROMPTS[0], max_new_tokens=14, ignore_eos=True))
        again = engine.submit(PROMPTS[0], max_new_tokens=14, ignore_eos=True)
        assert [token for event in again for token in event.tokens] == expected[0]


def test_closing_lets_requests_end_or_ends_them(expected):
    engine = make_engine()
    running = [engine.submit(prompt, max_new_tokens=14, ignore_eos=True) for prompt in PROMPTS]
    engine.close()
    assert [request.tokens for request in running] == expected
    with pytest.raises(EngineClosed, match="the engine is closed"):
        engine.submit([1], max_new_tokens=2)
    engine = make_engine()
    running = [engine.submit(prompt, max_new_tokens=14, ignore_eos=True) for prompt in PROMPTS]
    engine.close(finish=False)
    with pytest.raises(EngineClosed, match="the engine was closed"):
        list(running[-1])


def test_a_full_queue_is_refused():
    with make_engine(queue=2, rows=1) as engine:
        running = [engine.submit([1], max_new_tokens=40, ignore_eos=True) for _ in range(3)]
        with pytest.raises(QueueFull, match="3 requests are running or waiting, and the engine takes 3"):
            engine.submit([1], max_new_tokens=2)
        for request in running:
            request.cancel()
            list(request)
        assert len(list(engine.submit([1], max_new_tokens=1))) == 1


def test_a_bad_request_is_refused_at_once_and_counts_for_nothing():
    with make_engine(queue=1, rows=1) as engine:
        for _ in range(5):
            with pytest.raises(wmtp.UserError, match="temperature=-1"):
                engine.submit([1], max_new_tokens=2, temperature=-1)
        assert len(list(engine.submit([1], max_new_tokens=1))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rows=10**9), "rows=1000000000: must be a whole number, from 1 to 16384"),
        (dict(pages=1, page_size=4, chunk=4), "pages=1 of 4 positions hold no request: the shortest needs 6 positions"),
    ],
)
def test_an_engine_that_could_hold_no_request_is_refused(options, message):
    with pytest.raises(wmtp.UserError, match=message):
        make_engine(**options)


def test_an_engine_that_the_memory_does_not_hold_says_what_it_needs(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 3355443200000 bytes.")

    monkeypatch.setattr(Layout, "fresh", full)
    monkeypatch.setattr(Layout, "nbytes", 3_355_443_200_000)
    with pytest.raises(
        wmtp.UserError, match=r"caches and states need 3\.36 TB, more than there is: lower rows, context"
    ):
        make_engine()


def test_a_text_is_too_long_by_its_characters_only_where_no_tokens_make_it_fit():
    with make_engine() as engine:
        room = engine.room(0)
        # A token a character, and some more characters for what is made shorter before.
        assert len(engine.encode("a" * room)) == room
        engine.require_short("a" * (room * 4))
        with pytest.raises(PromptTooLong, match="1000000 characters are too many for the 64 tokens"):
            engine.submit("a" * 10**6, max_new_tokens=1)


def test_an_exception_that_leaves_the_block_ends_requests():
    running = []

    def leave() -> None:
        with make_engine(rows=1) as engine:
            running.extend(engine.submit(prompt, max_new_tokens=40, ignore_eos=True) for prompt in PROMPTS[:3])
            raise KeyError("on the way")

    with pytest.raises(KeyError, match="on the way"):
        leave()
    for request in running[1:]:
        with pytest.raises(EngineClosed, match="the engine was closed"):
            list(request)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_leaves_nobody_waiting(monkeypatch):
    def broken(core) -> bool:
        raise MemoryError("nothing left")

    monkeypatch.setattr(Core, "turn", broken)
    engine = make_engine()
    running = engine.submit([1], max_new_tokens=2)
    with pytest.raises(EngineClosed, match="the engine's thread ended: MemoryError: nothing left"):
        list(running)
    with pytest.raises(EngineClosed, match="the engine is closed"):
        engine.submit([1], max_new_tokens=2)
    engine.close()


def test_a_listener_whose_event_loop_is_gone_costs_nobody_else(expected):
    with make_engine(steps=1, gamma=0) as engine:
        running = engine.submit(PROMPTS[0], max_new_tokens=40, ignore_eos=True)
        asyncio.run(_some(running))
        other = engine.submit(PROMPTS[1], max_new_tokens=14, ignore_eos=True)
        assert [token for event in other for token in event.tokens] == expected[1]


async def _some(running: Running) -> None:
    """Waits for one event too many, and leaves the loop with it outstanding."""
    await anext(running)
    waiting = asyncio.ensure_future(anext(running))
    await asyncio.sleep(0)
    waiting.cancel()


def test_heads_without_a_cache_draft_here_too():
    model = with_random_heads("hybrid", "parallel", 2, 1)
    own = Model(decoder=model, config=model.config)
    plain = wmtp.generate(own, PROMPTS[:4], gamma=0, max_new_tokens=14).tokens
    with Engine(own, EngineOptions(rows=2, context=CONTEXT, gamma=2, window=0), warm_up=False) as engine:
        running = [engine.submit(prompt, max_new_tokens=14) for prompt in PROMPTS[:4]]
        assert [[token for event in request for token in event.tokens] for request in running] == plain
