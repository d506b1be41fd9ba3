"""After any step the state is that of a fresh prefill of the tokens it stands for: rejected drafts leave no trace.

What these claims cover of what goes wrong in speculative decoders: recurrent states that keep rejected tokens,
convolution histories that are not rolled back with them, a step without drafts that resumes from a stale state, states
that are not those at their boundary, and draft keys paired with the wrong token.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.drafters import mixed_table, oracle_table
from tests.decode.driving import SHAPES, Batch, append, batches, prefilled, run
from tests.decode.states import assert_same_drafts, assert_same_target_state
from wmtp_jax.decode.drafter import Plain
from wmtp_jax.decode.loop import decode, step
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import pack

pytestmark = pytest.mark.slow
seeds = st.integers(0, 2**20)


def fresh(model: Decoder, batch: Batch, texts: list[list[int]]) -> DecodeState:
    """The state after reading each row's prompt and text but for the last token, which is left pending."""
    prompts = [[*request.prompt, *text[:-1]] for request, text in zip(batch.requests, texts, strict=True)]
    again = Batch(batch.shape, [r._replace(prompt=prompt) for r, prompt in zip(batch.requests, prompts, strict=True)])
    state = prefilled(model, batch.shape.windowed, again)
    # Which token follows is the sampler's business, whose penalties count these tokens as text and not as prompt.
    pending = jnp.asarray([text[-1] for text in texts], jnp.int32)
    committed = replace(state.committed, tokens=state.committed.tokens.at[:, 0].set(pending))
    return replace(state, pending=pending, committed=committed)


def assert_counters(state: DecodeState, batch: Batch, texts: list[list[int]]) -> None:
    """Lengths, limits and the penalties' history, counted by hand."""
    for row, (request, text) in enumerate(zip(batch.requests, texts, strict=True)):
        assert int(state.length[row]) == len(request.prompt) + len(text) - 1
        assert int(state.remaining[row]) == request.limit - len(text)
        assert bool(state.done[row]) == (len(text) == request.limit or text[-1] == request.stop)
        if state.history is not None:
            counts = np.bincount(text, minlength=batch.shape.vocab)
            np.testing.assert_array_equal(state.history.emitted[row], counts)
            np.testing.assert_array_equal(state.history.in_prompt[row], np.isin(np.arange(counts.size), request.prompt))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(data=st.data(), weights=seeds, dice=seeds)
@settings(max_examples=5)
def test_after_every_step_the_state_is_that_of_a_fresh_prefill(shape, data, weights, dice):
    model, batch = shape.make(weights), data.draw(batches(shape, stops=True))
    text = run(model, Plain(), batch).texts
    table = oracle_table(batch.prompts, text, shape.capacities[0])
    table = mixed_table(table, shape.vocab, np.random.default_rng(dice), right=0.75)
    state = prefilled(model, shape.steered, batch, table)
    packed, texts = pack(model), [[int(token)] for token in state.pending]
    rows = list(range(shape.rows))
    while True:
        again = fresh(model, batch, texts)
        assert_counters(state, batch, texts)
        assert_same_target_state(state, again)
        # A row that was done before this step drafts nothing that is used, so its draft entries are not kept up.
        assert_same_drafts(model, state, replace(again, history=state.history), shape.gamma, batch.sampling, rows)
        if bool(jnp.all(state.done)):
            return
        rows = [row for row in range(shape.rows) if not state.done[row]]
        state, emitted = decode(packed, shape.steered, state, batch.sampling, batch.stops, 1)
        append(texts, emitted)


@given(data=st.data(), weights=seeds)
@settings(max_examples=8)
def test_a_step_without_drafts_goes_on_from_what_was_accepted(data, weights):
    shape = SHAPES[0]
    model, batch = shape.make(weights), data.draw(batches(shape))
    state = prefilled(model, shape.windowed, batch)
    packed, texts = pack(model), [[int(token)] for token in state.pending]
    for _ in range(data.draw(st.integers(0, 5))):
        state, emitted = decode(packed, shape.windowed, state, batch.sampling, batch.stops, 1)
        append(texts, emitted)
    state, choices, counts, _ = _plain_step(model, state, batch.sampling, batch.stops)
    assert choices.shape == (shape.rows, 1)
    for text, token, count in zip(texts, choices[:, 0], counts, strict=True):
        text += [int(token)] * int(count)
    assert_counters(state, batch, texts)
    assert_same_target_state(state, fresh(model, batch, texts))


@jax.jit
def _plain_step(model, state, sampling, stops):
    return step(model, Plain(), state, sampling, stops)
