"""The engine's claim: a request's tokens are those of plain decoding alone, whatever else goes on beside it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wmtp_jax as wmtp
from tests.engine.requests import (
    CONSTRAINTS,
    CONTEXT,
    ENGINES,
    Asked,
    Heard,
    alone,
    assert_nothing_is_held,
    drive,
    make_core,
    workloads,
)
from wmtp_jax.engine.core import Core, StepFailed
from wmtp_jax.engine.layout import rows_in
from wmtp_jax.engine.options import EngineOptions


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
@settings(max_examples=12)
@given(data=st.data())
def test_a_request_has_the_tokens_that_it_has_alone(kind, data):
    core, work = make_core(kind), data.draw(workloads(kind))
    heard = drive(core, work)
    for asked, got in zip(work, heard, strict=True):
        tokens, finished = alone(core, asked)
        assert not got.errors
        assert got.tokens == tokens[: len(got.tokens)]
        if asked.cancelled is None or asked.cancelled <= asked.turn - 1:
            assert (got.tokens, got.finished) == (tokens, finished)
    assert_nothing_is_held(core)


def requests(kind: str, count: int, prompt: int, new: int, seed: int = 0) -> list[Asked]:
    """Requests of one size, all at once, whose texts do not end early."""
    rng = np.random.default_rng(seed)
    return [
        Asked(rng.integers(0, 29, prompt).tolist(), dict(max_new_tokens=new, ignore_eos=True)) for _ in range(count)
    ]


def test_where_pages_run_out_the_newest_waits_and_every_request_ends():
    core = make_core("tight", prefix_bytes=0)
    work = requests("tight", 6, 12, 30)
    heard = drive(core, work)
    assert core.meter.preempted > 0
    assert [got.tokens for got in heard] == [alone(core, asked)[0] for asked in work]
    assert_nothing_is_held(core)


@pytest.mark.parametrize("kind", ["roomy", "tight", "long pages", "plain"])
def test_a_known_beginning_is_not_read_again_and_changes_nothing(kind):
    beginning = np.random.default_rng(5).integers(0, 29, 33).tolist()
    work = [Asked([*beginning, *tail], dict(max_new_tokens=12), turn=30 * index) for index, tail in enumerate(
        ([1], [2, 3, 4], [1, 5, 6, 7], list(range(7)))
    )]  # fmt: skip
    with_prefixes, without = make_core(kind), make_core(kind, prefix_bytes=0)
    heard, fresh = drive(with_prefixes, work), drive(without, work)
    assert [got.tokens for got in heard] == [got.tokens for got in fresh] == [alone(without, a)[0] for a in work]
    page = with_prefixes.page_size
    assert with_prefixes.meter.reused_tokens == 3 * (33 // page * page)
    assert with_prefixes.meter.prefill_tokens + with_prefixes.meter.reused_tokens == without.meter.prefill_tokens
    # The ring was rebuilt: drafts are as good as before.
    np.testing.assert_array_equal(with_prefixes.meter.histogram, without.meter.histogram)


def test_states_of_beginnings_keep_to_their_limit():
    probe = make_core("roomy")
    drive(probe, requests("roomy", 1, 9, 2))
    assert len(probe.prefixes) == 1
    core = make_core("roomy", prefix_bytes=int(2.5 * probe.prefixes.bytes))
    drive(core, requests("roomy", 5, 30, 2))
    assert len(core.prefixes) == 2
    assert core.prefixes.bytes == 2 * probe.prefixes.bytes


def test_a_cancelled_request_frees_its_pages_at_once():
    core = make_core("roomy", prefix_bytes=0)
    heard = Heard()
    task = core.make_task([1] * 20, heard, max_new_tokens=30, ignore_eos=True)
    core.add(task)
    for _ in range(6):
        core.turn()
    assert heard.tokens
    assert core.pool.free < core.pool.pages
    assert core.cancel(task)
    assert_nothing_is_held(core)
    assert not core.cancel(task)
    assert not core.turn()
    assert heard.finished is None


def test_a_short_prompt_does_not_wait_for_a_long_one():
    core = make_core("roomy", prefill_tokens=8)
    long, short = Heard(), Heard()
    core.add(core.make_task([1] * 56, long, max_new_tokens=2))
    core.turn()
    core.add(core.make_task([2] * 5, short, max_new_tokens=2))
    turns = 0
    while not short.tokens:
        core.turn()
        turns += 1
    assert turns <= 2
    assert not long.tokens


def test_a_failed_step_ends_what_was_running_and_nothing_else(monkeypatch):
    core = make_core("roomy")
    work = requests("roomy", 5, 10, 12)
    heard = [Heard() for _ in work]
    for asked, listener in zip(work, heard, strict=True):
        core.add(core.make_task(asked.prompt, listener, **asked.options))
    run = type(core._slots).run
    calls = []

    def fail_once(slots, state, *arguments, **given):
        calls.append(1)
        if len(calls) == 2:
            # What the device does to donated arrays when a program fails half-way.
            state.length.delete()
            raise RuntimeError("out of memory on the device")
        return run(slots, state, *arguments, **given)

    monkeypatch.setattr(type(core._slots), "run", fail_once)
    with pytest.raises(StepFailed, match="the engine's step failed: RuntimeError: out of memory on the device"):
        _to_the_end(core)
    lost = [got for got in heard if got.errors]
    assert 1 <= len(lost) <= 3
    _to_the_end(core)
    for asked, got in zip(work, heard, strict=True):
        assert bool(got.errors) != (got.finished is not None)
        if not got.errors:
            assert got.tokens == alone(core, asked)[0]
    assert_nothing_is_held(core)


def test_a_request_that_cannot_enter_is_lost_and_the_next_goes_on(monkeypatch):
    core = make_core("roomy")
    clear, calls = type(core._slots).clear, []

    def fail_once(slots, state, *arguments):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return clear(slots, state, *arguments)

    monkeypatch.setattr(type(core._slots), "clear", fail_once)
    work, heard = requests("roomy", 2, 10, 5), [Heard(), Heard()]
    for asked, listener in zip(work, heard, strict=True):
        core.add(core.make_task(asked.prompt, listener, **asked.options))
    with pytest.raises(StepFailed, match="no memory"):
        core.turn()
    _to_the_end(core)
    assert [bool(got.errors) for got in heard] == [True, False]
    assert heard[1].tokens == alone(core, work[1])[0]
    assert_nothing_is_held(core)


@pytest.mark.parametrize("prompt", [4, 50])
def test_a_pool_for_every_rows_context_fills_every_row(prompt):
    core = make_core("roomy", page_size=CONTEXT, prefix_bytes=0)
    drive(core, requests("roomy", 5, prompt, 9))
    assert core.meter.most_running == core.options.rows
    assert not core.meter.preempted


def _to_the_end(core: Core) -> None:
    while core.turn():
        pass


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1] * 50, dict(max_new_tokens=30), "30 new ones and 4 for drafts are 84, and this engine holds 64"),
        ([1], dict(gamma=4), "gamma=4: must be a whole number, from 0 to 3"),
        ([1], dict(gamma=True), "gamma=True: must be a whole number"),
        ([1], dict(window=4), "window: is set for the whole engine; a request may give"),
        ([1], dict(colour=4), "colour: is not known; a request may give"),
        ([1], dict(temperature=-1.0), "temperature=-1.0: must be from 0 to"),
        ([[1], [2]], {}, "a request has one prompt, not 2"),
        ([99], {}, "token id 99 at position 0 is not in 0 to 42"),
        ([1], dict(logprobs=21), "logprobs=21: must be a whole number, from 0 to 20"),
        ([1], dict(logprobs=True), "logprobs=True: must be a whole number"),
        ([1], dict(max_new_tokens=9, constraint=CONSTRAINTS[0]), "constraint: this engine was set up without"),
    ],
)  # fmt: skip
def test_bad_requests_get_one_line(prompt, options, message):
    core = make_core("roomy")
    with pytest.raises(wmtp.UserError, match=message):
        core.make_task(prompt, Heard(), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rows=0), "rows=0: must be a whole number, from 1 to 16384"),
        (dict(chunk=3), "chunk=3 must divide page_size=8"),
        (dict(sink=4, window=0), "sink=4 needs a window"),
        (dict(cache_dtype="int4"), "cache_dtype=int4: must be one of"),
        (dict(gamma="auto"), "gamma=auto: must be a whole number, from 0 to 8"),
        (dict(rows=2.5), "rows=2.5: must be a whole number"),
        (dict(context=2), "context=2: must be a whole number, 6 or more"),
    ],
)
def test_bad_engines_get_one_line(changes, message):
    with pytest.raises(wmtp.UserError, match=message):
        make_core("roomy", **changes)


def test_a_pool_smaller_than_the_context_bounds_requests():
    core = make_core("roomy", pages=4)
    with pytest.raises(wmtp.UserError, match="this engine holds 32 a request"):
        core.make_task([1] * 20, Heard(), max_new_tokens=20)


def test_a_warm_engine_compiles_nothing_more(caplog):
    import jax

    jax.clear_caches()
    core = make_core("roomy")
    work = [
        Asked(
            asked.prompt, asked.options | dict(temperature=float(index % 2), presence_penalty=index % 3 / 2), turn=index
        )
        for index, asked in enumerate(requests("roomy", 7, 9, 8))
    ]
    repeated = [*work, *(asked._replace(turn=40 + asked.turn) for asked in work)]

    def compiled() -> list[str]:
        return [record.message for record in caplog.records if "Compiling" in record.message]

    jax.config.update("jax_log_compiles", True)
    try:
        core.warm_up()
        assert len(compiled()) > 8
        caplog.clear()
        drive(core, repeated)
        assert compiled() == []
    finally:
        jax.config.update("jax_log_compiles", False)
    assert core.meter.reused_tokens


def test_nothing_to_write_ends_at_once():
    core, heard = make_core("roomy"), Heard()
    core.add(core.make_task([1, 2], heard, max_new_tokens=0))
    assert not core.turn()
    assert (heard.tokens, heard.finished) == ([], "length")


def test_a_window_admits_more_rows_than_native_drafts():
    """One memory, two engines: what the ring frees of the draft's cache holds further requests."""
    shape = dict(context=CONTEXT, page_size=8, chunk=8, gamma=3, sink=0, prefix_bytes=0, prefill_tokens=10**4)
    model = make_core("long pages").model
    found = {w: rows_in(model, 400_000, EngineOptions(window=w, **shape)) for w in (0, 8)}
    assert found[8] > found[0] > 4
    for window, rows in found.items():
        core = Core(model, EngineOptions(window=window, rows=rows, **shape))
        held = core.device_bytes()
        assert held <= 400_000 < held + held / rows
        # All of a row's pages at once, so that none is to spare.
        drive(core, requests("long pages", rows, CONTEXT - 8, 4))
        assert core.meter.most_running == rows
