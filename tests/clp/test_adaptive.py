"""A number of drafts that changes from step to step changes the speed, never the text."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clp.backbones import with_random_heads
from tests.decode.driving import SHAPES, Batch, Outcome, Request, append, batches, prefilled, run
from tests.decode.recompute import assert_same_texts
from tests.tiny import tiny_model
from wmtp_jax.clp.adaptive import Adaptive, choose_count, foreseen, survival, updated, with_costs
from wmtp_jax.clp.drafter import heads_drafter
from wmtp_jax.decode.drafter import MTPDrafter, Plain
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import pack

pytestmark = pytest.mark.slow


def adapted(model: Decoder, drafter: Adaptive, batch: Batch, costs, forced: list[int]) -> Outcome:
    """Decodes to the end; ``forced`` are the numbers of drafts of the first calls, -1 to choose."""
    state = with_costs(prefilled(model, drafter, batch), jnp.asarray(costs))
    packed, texts = pack(model), [[int(token)] for token in state.pending]
    accepted = np.zeros(drafter.gamma + 1, int)
    forced = [*forced]
    while not bool(jnp.all(state.done)):
        state = with_costs(state, jnp.asarray(costs), forced.pop(0) if forced else -1)
        state, emitted = decode(packed, drafter, state, batch.sampling, batch.stops, 2)
        append(texts, emitted)
        accepted += np.asarray(emitted.accepted)
    return Outcome(texts, accepted, state)


@pytest.mark.parametrize("kind", [None, "own", "parallel"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1]], ids=str)
@given(data=st.data(), weights=st.integers(0, 99))
@settings(max_examples=4)
def test_text_is_the_same_whatever_the_number_of_drafts(kind, shape, data, weights):
    model = (
        tiny_model(shape.model, weights) if kind is None else with_random_heads(shape.model, kind, shape.gamma, weights)
    )
    batch = data.draw(batches(shape, stops=True))
    costs = data.draw(st.lists(st.floats(0.5, 3), min_size=shape.gamma + 1, max_size=shape.gamma + 1))
    forced = data.draw(st.lists(st.integers(-1, shape.gamma), max_size=6))
    inner = (
        MTPDrafter(gamma=shape.gamma, window=shape.window, sink=shape.sink)
        if kind is None
        else heads_drafter(model, shape.gamma, shape.window, shape.sink)
    )
    outcome = adapted(model, Adaptive(drafter=inner), batch, costs, forced)
    assert_same_texts(model, batch, run(model, Plain(), batch).texts, outcome.texts, f"{costs} {forced}")


def _one_request(shape, limit: int) -> Batch:
    return Batch(replace(shape, rows=1), [Request([3, 1, 4, 1, 5], limit, -1, SamplingParams())])


@pytest.mark.parametrize(("costs", "chosen"), [([1, 1, 1, 1], 3), ([1, 9, 9, 9], 0), ([1, 1.01, 9, 9], 1)])
def test_drafts_are_made_where_they_pay(costs, chosen):
    shape = SHAPES[0]
    model = with_random_heads(shape.model, "own", shape.gamma, 3)
    model.heads.predictor.kernel[...] = jnp.zeros_like(model.heads.predictor.kernel[...])
    model.heads.predictor.bias[...] = jnp.log(jnp.array([0.4, 0.2, 0.2, 0.2]))
    state = with_costs(prefilled(model, Adaptive(drafter=shape.windowed), _one_request(shape, 20)), jnp.asarray(costs))
    assert int(choose_count(state, state.draft.pace, foreseen(model, state, shape.gamma))) == chosen


def test_without_a_predictor_plain_decoding_is_given_up_now_and_then():
    shape = SHAPES[0]
    model = tiny_model(shape.model, 3)
    drafter = Adaptive(drafter=shape.windowed)
    state = with_costs(prefilled(model, drafter, _one_request(shape, 70)), jnp.asarray([1.0, 50, 60, 70]))
    packed = pack(model)
    batch = _one_request(shape, 70)
    state, _ = decode(packed, drafter, state, batch.sampling, batch.stops, 64)
    expected = np.asarray(state.draft.pace.foreseen)
    # Two steps in sixty-four drafted one token, each with an even chance, on top of what is foreseen before the first.
    assert 1.9 < expected[0] <= 2
    assert expected[1] == 1


def test_drafts_come_back_when_they_are_right_again():
    """After a hard passage every step makes one draft more now and then: first one, in time all."""
    shape = SHAPES[0]
    model = tiny_model(shape.model, 3)
    state = with_costs(
        prefilled(model, Adaptive(drafter=shape.windowed), _one_request(shape, 20)), jnp.asarray([1.0, 1.2, 1.4, 1.6])
    )
    pace, expected = state.draft.pace, foreseen(model, state, shape.gamma)
    live = jnp.ones(1, bool)
    numbers = {}
    for name, right in (("hard", False), ("easy", True)):
        made = []
        for _ in range(300):
            count = choose_count(state, pace, expected)
            made.append(int(count))
            pace = updated(pace, count, jnp.where(right, count + 1, 1)[None], live, expected)
        numbers[name] = made
    assert np.mean(numbers["hard"][-64:]) < 0.1
    assert numbers["easy"][-64:].count(shape.gamma) > 50


@given(st.lists(st.floats(0, 30), min_size=3, max_size=3), st.lists(st.floats(0.1, 30), min_size=3, max_size=3))
def test_longer_runs_are_never_likelier(right, foreseen_before):
    shape = SHAPES[0]
    model = tiny_model(shape.model, 3)
    state = prefilled(model, Adaptive(drafter=shape.windowed), _one_request(shape, 20))
    pace = replace(state.draft.pace, right=jnp.asarray(right), foreseen=jnp.asarray(foreseen_before))
    chances = np.asarray(survival(pace, jnp.asarray([[0.9, 0.9, 0.8]])))
    assert (np.diff(chances) <= 0).all()
    assert chances.max() <= 1


def test_a_predictor_that_sees_too_much_is_corrected():
    """Heads that are never right, and a predictor that is sure of all three: drafts must soon stop."""
    shape = SHAPES[0]
    model = with_random_heads(shape.model, "parallel", shape.gamma, 3)
    for writer in model.heads.writers:
        writer.outer.bias[...] = jnp.zeros_like(writer.outer.bias[...]).at[42].set(1e4)
    model.heads.predictor.bias[...] = jnp.array([0.0, 0, 0, 1e3])
    batch = _one_request(shape, 70)
    state = with_costs(
        prefilled(model, Adaptive(drafter=heads_drafter(model, 3, 0, 0)), batch), jnp.asarray([1, 1.3, 1.6, 2])
    )
    state, emitted = decode(
        pack(model), Adaptive(drafter=heads_drafter(model, 3, 0, 0)), state, batch.sampling, batch.stops, 60
    )
    assert 42 not in np.asarray(emitted.tokens)[0, :60]
    assert int(emitted.steps) == 60
    # Each step with three drafts adds one to what was foreseen of the third.
    assert float(state.draft.pace.foreseen[2]) < 8
