"""One request has one text: drafts, batch neighbors and cuts change how fast it comes, never what it says.

What these claims cover of what goes wrong in speculative decoders: rows of a batch leaking into each other, a stop
inside an accepted run, output past the limit, drafts past the limit, penalties ignored for drafted positions, text
that depends on the draft's window, and a draft length whose buffers are too small.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.drafters import mixed_table, oracle_table, wrong_table
from tests.decode.driving import SHAPES, Batch, batches, run
from tests.decode.recompute import assert_same_texts, recomputed
from wmtp_jax.decode.drafter import Plain

pytestmark = pytest.mark.slow
seeds = st.integers(0, 2**20)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(data=st.data(), weights=seeds, dice=seeds)
@settings(max_examples=12)
def test_text_is_the_same_whatever_the_drafts(shape, data, weights, dice):
    model, rng = shape.make(weights), np.random.default_rng(dice)
    batch = data.draw(batches(shape, stops=True))
    plain = run(model, Plain(), batch)
    for drafter in (shape.windowed, shape.native):
        assert_same_texts(model, batch, plain.texts, run(model, drafter, batch).texts, str(drafter))

    right = oracle_table(batch.prompts, plain.texts, shape.capacities[0])
    tables = {
        "right": right,
        "wrong": wrong_table(right, shape.vocab),
        "sometimes right": mixed_table(right, shape.vocab, rng, right=0.7),
        "random": rng.integers(0, shape.vocab, right.shape, dtype=np.int32),
        "the head's own, sometimes": np.where(rng.random(right.shape) < 0.5, -1, right),
    }
    tokens_after_first = np.array([len(text) - 1 for text in plain.texts])
    for name, table in tables.items():
        outcome = run(model, shape.steered, batch, table)
        if not assert_same_texts(model, batch, plain.texts, outcome.texts, f"{name} drafts"):
            continue
        steps = int(outcome.accepted.sum())
        if name == "right":
            assert steps == np.sum(-(-tokens_after_first // (shape.gamma + 1)))
        if name == "wrong":
            assert outcome.accepted.tolist() == [tokens_after_first.sum()] + [0] * shape.gamma


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(data=st.data(), weights=seeds)
@settings(max_examples=5)
def test_plain_text_is_that_of_recomputing_the_whole_sequence_for_every_token(shape, data, weights):
    model, batch = shape.make(weights), data.draw(batches(shape, stops=True))
    assert_same_texts(model, batch, recomputed(model, batch), run(model, Plain(), batch).texts, "plain")


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.rows > 1], ids=str)
@given(data=st.data(), weights=seeds, row=st.integers(0, 3))
@settings(max_examples=5)
def test_a_row_does_not_notice_its_neighbors(shape, data, weights, row):
    model, row = shape.make(weights), row % shape.rows
    batch = data.draw(batches(shape))
    other = data.draw(batches(shape))
    mixed = Batch(shape, [batch.requests[i] if i == row else request for i, request in enumerate(other.requests)])
    one, two = (run(model, shape.windowed, either).texts[row] for either in (batch, mixed))
    lone = [one if i == row else [] for i in range(shape.rows)]
    assert_same_texts(model, mixed, lone, [two if i == row else [] for i in range(shape.rows)], "among others")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(data=st.data(), weights=seeds)
@settings(max_examples=5)
def test_a_stop_inside_an_accepted_run_ends_the_text_there(shape, data, weights):
    """All drafts are right, and the stop is one of the tokens that they would run over."""
    model, batch = shape.make(weights), data.draw(batches(shape))
    free = run(model, Plain(), batch).texts
    pairs = zip(batch.requests, free, strict=True)
    stopped = Batch(shape, [r._replace(stop=data.draw(st.sampled_from(text))) for r, text in pairs])
    cut = [text[: text.index(r.stop) + 1] for r, text in zip(stopped.requests, free, strict=True)]
    right = oracle_table(batch.prompts, free, shape.capacities[0])
    outcome = run(model, shape.steered, stopped, right)
    assert_same_texts(model, stopped, cut, outcome.texts, "stopped")
    assert all(len(text) <= r.limit for text, r in zip(outcome.texts, stopped.requests, strict=True))
