"""The draft's window: as good as none while it reaches everything, and a ring that cannot be told from a full cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.drafters import StrictDrafter, UnwrappedDrafter
from tests.decode.driving import SHAPES, Batch, Request, batches, prefilled
from tests.decode.states import drafts
from wmtp_jax.decode.drafter import MTPDrafter, draft_run
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import pack

pytestmark = pytest.mark.slow
seeds = st.integers(0, 2**20)
SHAPE, WINDOW, SINK = SHAPES[0], 40, 3


def _both_states(length: int, seed: int) -> tuple[Batch, Decoder, DecodeState, DecodeState]:
    """After a prompt of ``length`` tokens in the first row: with the window, and without."""
    rng = np.random.default_rng(seed)
    room = [capacity - SHAPE.gamma - 4 for capacity in SHAPE.capacities]
    prompts = [rng.integers(0, SHAPE.vocab, min(length, most)).tolist() for most in room]
    batch = Batch(SHAPE, [Request(prompt, 3, -1, SamplingParams()) for prompt in prompts])
    model = SHAPE.make(seed)
    windowed = MTPDrafter(gamma=SHAPE.gamma, window=WINDOW, sink=SINK)
    return batch, model, *(prefilled(model, drafter, batch) for drafter in (windowed, SHAPE.native))


@given(length=st.integers(1, WINDOW + SINK) | st.integers(WINDOW - 1, WINDOW + SINK), seed=seeds)
@settings(max_examples=12)
def test_a_window_and_sink_that_reach_everything_draft_as_the_native_head(length, seed):
    batch, model, windowed, native = _both_states(length, seed)
    tokens, logits, _ = drafts(model, windowed, SHAPE.gamma, batch.sampling)
    native_tokens, native_logits, _ = drafts(model, native, SHAPE.gamma, batch.sampling)
    np.testing.assert_array_equal(tokens, native_tokens)
    # The native cache has more slots, over which the same sums are added up in another order.
    np.testing.assert_allclose(logits, native_logits, atol=1e-5, rtol=1e-5)


@given(length=st.integers(WINDOW, WINDOW + SINK), seed=seeds)
@settings(max_examples=6)
def test_a_window_and_sink_that_reach_everything_are_bit_for_bit_none_on_the_same_slots(length, seed):
    """The same ring without a sink and with a window beyond any length is the native head."""
    batch, model, windowed, _ = _both_states(length, seed)
    native = replace(windowed, draft=replace(windowed.draft, sink=0, window=10**6))
    (tokens, logits, _), (native_tokens, native_logits, _) = (
        drafts(model, state, SHAPE.gamma, batch.sampling) for state in (windowed, native)
    )
    np.testing.assert_array_equal(tokens, native_tokens)
    np.testing.assert_array_equal(logits, native_logits)


@given(seed=seeds)
@settings(max_examples=4)
def test_one_token_more_than_window_and_sink_and_a_key_is_out_of_sight(seed):
    batch, model, windowed, native = _both_states(WINDOW + SINK + 1, seed)
    logits, native_logits = (drafts(model, s, SHAPE.gamma, batch.sampling)[1][0] for s in (windowed, native))
    assert np.abs(logits - native_logits).max() > 1e-5


@given(data=st.data(), weights=seeds)
@settings(max_examples=6)
def test_drafts_from_the_ring_are_those_from_a_full_cache_with_the_same_window(data, weights):
    """Step by step, over texts that go round the ring several times."""
    shape = SHAPES[4]
    model, batch = shape.make(weights), data.draw(batches(shape))
    batch = replace(batch, requests=[request._replace(limit=24) for request in batch.requests])
    full = UnwrappedDrafter(gamma=shape.gamma, window=shape.window, sink=shape.sink)
    packed = pack(model)
    ring_state, full_state = (prefilled(model, drafter, batch) for drafter in (shape.windowed, full))
    while not bool(jnp.all(ring_state.done)):
        alive = ~np.asarray(ring_state.done)
        ours, theirs = (drafts(model, state, shape.gamma, batch.sampling) for state in (ring_state, full_state))
        np.testing.assert_array_equal(ours[0][alive], theirs[0][alive])
        np.testing.assert_allclose(ours[1][alive], theirs[1][alive], atol=1e-5, rtol=1e-5)
        args = (batch.sampling, batch.stops, 1)
        ring_state, emitted = decode(packed, shape.windowed, ring_state, *args)
        full_state, expected = decode(packed, full, full_state, *args)
        np.testing.assert_array_equal(emitted.tokens, expected.tokens)
        np.testing.assert_array_equal(emitted.accepted, expected.accepted)


@pytest.mark.parametrize(("gamma", "window", "sink"), [(1, 1, 0), (2, 1, 3), (4, 1, 0), (8, 2, 1), (3, 6, 2)])
def test_no_store_puts_two_entries_into_one_slot(gamma, window, sink):
    """Neither a long prompt nor a run that was accepted whole."""
    shape = replace(SHAPE, model="counted", rows=2, chunk=64)
    requests = [Request([1] * length, gamma + 2, -1, SamplingParams()) for length in (40, 1)]
    batch, model = Batch(shape, requests), shape.make(0)
    drafter = StrictDrafter(gamma=gamma, window=window, sink=sink)
    with jax.disable_jit():
        state = prefilled(model, drafter, batch)
        whole = jnp.full_like(state.length, gamma + 1)
        accepted = replace(state, length=state.length + whole, committed=replace(state.committed, count=whole))
        draft_run(model, accepted, gamma, batch.sampling)


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
