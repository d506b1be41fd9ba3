"""Batches draft where drafts pay, and not where they do not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clp.backbones import with_random_heads
from tests.engine.requests import Asked, Heard, Wavering, alone, drive, make_core
from wmtp_jax.engine.core import Core
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.engine.pace import Kind, Pace
from wmtp_jax.model import Model

ONE, MANY = Kind(1, plain=True), Kind(16, plain=True)


def told(pace: Pace, kind: Kind, calls: int, costs: dict[bool, float], tokens_a_step: float) -> list[bool]:
    """What the pace chooses, call by call, on a machine with these costs of a step (with drafts and without)."""
    chosen = []
    for _ in range(calls):
        drafting = pace.drafts(kind)
        rows, steps = kind.bucket, 4
        tokens = round(steps * rows * (tokens_a_step if drafting else 1))
        pace.took(
            kind,
            drafting=drafting,
            seconds=steps * costs[drafting],
            steps=steps,
            tokens=tokens,
            row_steps=steps * rows,
        )
        chosen.append(drafting)
    return chosen


@given(
    tokens=st.floats(1.0, 4.0),
    ratio=st.floats(1.0, 6.0),
    scale=st.floats(1e-5, 10.0),
)
def test_the_way_that_brings_more_a_second_is_taken(tokens, ratio, scale):
    tokens = round(64 * tokens) / 64
    pace = Pace()
    chosen = told(pace, MANY, 200, {True: ratio * scale, False: scale}, tokens)[20:]
    if abs(tokens / ratio - 1) > 1e-3:
        better = tokens > ratio
        # But for a look at the other one now and then.
        assert np.mean([way == better for way in chosen]) == pytest.approx(31 / 32, abs=0.01)


def test_every_size_of_batch_has_costs_of_its_own():
    pace = Pace()
    for _ in range(8):
        one = told(pace, ONE, 20, {True: 2.0, False: 1.0}, 2.5)
        many = told(pace, MANY, 20, {True: 3.0, False: 1.0}, 2.5)
    assert sum(one) >= 19
    assert sum(many) <= 1


def test_a_call_that_compiles_and_one_that_was_held_up_change_nothing():
    pace = Pace()
    for drafting in (True, False):
        pace.took(MANY, drafting=drafting, seconds=60.0, steps=1, tokens=16, row_steps=16)
    told(pace, MANY, 100, {True: 3.0, False: 1.0}, 2.0)
    pace.took(MANY, drafting=False, seconds=500.0, steps=1, tokens=16, row_steps=16)
    assert sum(told(pace, MANY, 31, {True: 3.0, False: 1.0}, 2.0)) <= 1


def test_text_that_drafts_become_right_on_is_noticed():
    pace = Pace()
    told(pace, MANY, 200, {True: 2.0, False: 1.0}, 1.2)
    chosen = told(pace, MANY, 4000, {True: 2.0, False: 1.0}, 3.5)
    assert np.mean(chosen[-320:]) > 0.9


@pytest.mark.parametrize("kind", ["parallel", "recurrent"])
def test_rows_that_rest_keep_what_heads_draft_from(kind):
    decoder = with_random_heads("hybrid", kind, 3, 0)
    model = Model(decoder=decoder, config=decoder.config, tokenizer=None)
    core = Core(model, EngineOptions(rows=2, context=64, page_size=8, chunk=8, gamma=2, window=5, sink=1))
    core._pace = Wavering()
    work = [Asked([5, 6, 7, 8, 9, 1], dict(max_new_tokens=20, ignore_eos=True)), Asked([4], dict(max_new_tokens=9))]
    assert [got.tokens for got in drive(core, work)] == [alone(core, asked)[0] for asked in work]


@pytest.mark.parametrize("kind", ["roomy", "long pages", "tight"])
@pytest.mark.parametrize("turns", [1, 4, 11])
def test_drafts_after_a_rest_are_those_of_a_row_that_drafted_in_vain(kind, turns):
    def drafts(resting: bool) -> np.ndarray:
        """After some steps of one token each: the row's own drafts are taken by nobody, or are not made."""
        core = make_core(kind, rows=1, steps=1, rest=resting)
        task = core.make_task([3, 1, 4, 1, 5, 9, 2, 6, 5], Heard(), max_new_tokens=30, ignore_eos=True, gamma=0)
        core.add(task)
        while task.slot is None or task.reading:
            core.turn()
        for _ in range(turns):
            core.turn()
        assert len(task.emitted) == turns + 2
        most = replace(core._state.draft, most=np.full(1, core.drafter.gamma, np.int32))
        sampling = core._inputs.sampling([task], 1)
        table = core._table(task)[None]
        return core._slots.propose(replace(core._state, draft=most), [0], table, sampling)[1]

    np.testing.assert_array_equal(drafts(resting=True), drafts(resting=False))
