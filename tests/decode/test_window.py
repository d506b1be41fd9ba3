"""The draft's window: as good as none while it reaches everything, and a ring that nobody can tell from a full cache."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.drafters import UnwrappedDrafter
from tests.decode.driving import SHAPES, Batch, Request, Shape, batches, prefilled
from tests.decode.states import drafts
from wmtp_jax.decode.drafter import MTPDrafter
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.errors import UserError

pytestmark = pytest.mark.slow
seeds = st.integers(0, 2**20)
WINDOW, SINK = 40, 3


def _both_drafts(shape: Shape, length: int, seed: int):
    rng = np.random.default_rng(seed)
    room = [capacity - shape.gamma - 4 for capacity in shape.capacities]
    prompts = [rng.integers(0, shape.vocab, min(length, most)).tolist() for most in room]
    batch = Batch(shape, [Request(prompt, 3, -1, SamplingParams()) for prompt in prompts])
    model = shape.make(seed)
    for drafter in (MTPDrafter(gamma=shape.gamma, window=WINDOW, sink=SINK), shape.native):
        state = prefilled(model, drafter, batch)
        tokens, logits, _ = drafts(model, state, shape.gamma, batch.sampling)
        yield np.asarray(tokens), np.asarray(logits)


@given(length=st.integers(1, WINDOW + SINK) | st.integers(WINDOW - 1, WINDOW + SINK), seed=seeds)
@settings(max_examples=12)
def test_a_window_and_sink_that_reach_everything_draft_exactly_as_the_native_head(length, seed):
    (tokens, logits), (native_tokens, native_logits) = _both_drafts(SHAPES[0], length, seed)
    np.testing.assert_array_equal(tokens, native_tokens)
    np.testing.assert_array_equal(logits, native_logits)


@given(seed=seeds)
@settings(max_examples=4)
def test_one_token_more_than_window_and_sink_and_a_key_is_out_of_sight(seed):
    (_, logits), (_, native_logits) = _both_drafts(SHAPES[0], WINDOW + SINK + 1, seed)
    assert np.abs(logits[0] - native_logits[0]).max() > 1e-5


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]], ids=str)
@given(data=st.data(), weights=seeds)
@settings(max_examples=4)
def test_drafts_from_the_ring_are_those_from_a_full_cache_with_the_same_window(shape, data, weights):
    """Step by step, over texts that go round the ring several times."""
    model, batch = shape.make(weights), data.draw(batches(shape))
    batch = replace(batch, requests=[request._replace(limit=24) for request in batch.requests])
    full = UnwrappedDrafter(gamma=shape.gamma, window=shape.window, sink=shape.sink)
    ring_state, full_state = (prefilled(model, drafter, batch) for drafter in (shape.windowed, full))
    while not bool(jnp.all(ring_state.done)):
        alive = ~np.asarray(ring_state.done)
        ours, theirs = (drafts(model, state, shape.gamma, batch.sampling) for state in (ring_state, full_state))
        np.testing.assert_array_equal(ours[0][alive], theirs[0][alive])
        np.testing.assert_allclose(ours[1][alive], theirs[1][alive], atol=1e-5, rtol=1e-5)
        args = (batch.sampling, batch.stops, 1)
        ring_state, emitted = decode(model, shape.windowed, ring_state, *args)
        full_state, expected = decode(model, full, full_state, *args)
        np.testing.assert_array_equal(emitted.tokens, expected.tokens)
        np.testing.assert_array_equal(emitted.accepted, expected.accepted)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (dict(gamma=3, window=0, sink=4), "sink=4 needs a window"),
        (dict(gamma=3, window=-1), "window=-1"),
        (dict(gamma=0, window=5), "gamma=0"),
        (dict(gamma=2, window=5, sink=-2), "sink=-2"),
    ],
)
def test_a_draft_that_makes_no_sense_is_refused(fields, names):
    with pytest.raises(UserError, match=names):
        MTPDrafter(**fields)
