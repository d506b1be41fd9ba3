"""What heads write unverified changes the text, and nothing else: caches hold exactly the text that came out."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Int

from tests.clp.backbones import with_random_heads
from tests.decode.driving import SHAPES, Batch, Outcome, Request, append, batches, prefilled, run
from tests.decode.recompute import assert_same_texts
from tests.decode.states import assert_same_target_state, readable_entries
from tests.tiny import tiny_model
from wmtp_jax.clp.drafter import HeadsDrafter, heads_drafter
from wmtp_jax.clp.trusting import Trusting
from wmtp_jax.decode.drafter import MTPDrafter, Plain
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.generation.options import ACCEPTS
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import pack

pytestmark = pytest.mark.slow
seeds = st.integers(0, 99)
RULES = ACCEPTS[1:]
# One hybrid with attention and delta layers, Mamba2 with experts, penalties and every sampler.
TRUSTED = [SHAPES[0], SHAPES[3], SHAPES[5]]


@dataclass(frozen=True, kw_only=True)
class Foreseeing(Trusting):
    """Takes exactly those of the heads' tokens that are in ``text``: an oracle's lengths."""

    text: tuple[tuple[int, ...], ...] = ()

    def take(self, model, state, tokens, logits) -> Int[Array, " B"]:
        longest = max(map(len, self.text)) + self.gamma + 2
        table = jnp.asarray([[*row, *[-1] * (longest - len(row))] for row in self.text])
        positions = state.length[:, None] + 1 + jnp.arange(self.gamma)
        right = jnp.take_along_axis(table, positions, axis=1, mode="clip")
        return jnp.cumprod(tokens == right, axis=1).sum(axis=1)


def trusted(model: Decoder, drafter: Trusting, batch: Batch, steps: int = 1) -> Outcome:
    """Decodes without verification until every row is done."""
    state = prefilled(model, drafter, batch)
    packed, texts = pack(model), [[int(token)] for token in state.pending]
    accepted = np.zeros(drafter.gamma + 1, int)
    while not bool(jnp.all(state.done)):
        state, emitted = decode(packed, drafter, state, batch.sampling, batch.stops, steps)
        append(texts, emitted)
        accepted += np.asarray(emitted.accepted)
    return Outcome(texts, accepted, state)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(k, s) for k in ("parallel", "own") for s in TRUSTED] + [("residual", TRUSTED[0]), ("recurrent", TRUSTED[1])],
)
@given(data=st.data(), weights=seeds)
@settings(max_examples=3)
def test_a_predictor_that_always_says_none_makes_plain_decoding(kind, shape, data, weights):
    model = with_random_heads(shape.model, kind, shape.gamma, weights, unrolled=shape.unrolled)
    size = model.heads.predictor.kernel[...].shape
    model.heads.predictor.kernel[...] = jnp.zeros(size)
    model.heads.predictor.bias[...] = jnp.zeros(size[1]).at[0].set(9.0)
    batch = data.draw(batches(shape, stops=True))
    plain = run(tiny_model(shape.model, weights, unrolled=shape.unrolled), Plain(), batch)
    drafter = Trusting(drafter=heads_drafter(model, shape.gamma, shape.window, shape.sink), rule="clp", tau=0.5)
    outcome = trusted(model, drafter, batch)
    assert_same_texts(model, batch, plain.texts, outcome.texts, "never trusting")
    assert outcome.accepted[1:].sum() == 0


@pytest.mark.parametrize("shape", TRUSTED, ids=str)
@given(data=st.data(), weights=seeds)
@settings(max_examples=4)
def test_with_an_oracle_for_the_length_the_text_is_the_backbones_own(shape, data, weights):
    model = with_random_heads(shape.model, "own", shape.gamma, weights, unrolled=shape.unrolled)
    batch = data.draw(batches(shape, stops=True))
    plain = run(tiny_model(shape.model, weights, unrolled=shape.unrolled), Plain(), batch)
    whole = tuple((*prompt, *text) for prompt, text in zip(batch.prompts, plain.texts, strict=True))
    heads = MTPDrafter(gamma=shape.gamma, window=shape.window, sink=shape.sink)
    outcome = trusted(model, Foreseeing(drafter=heads, rule="all", text=whole), batch)
    assert_same_texts(model, batch, plain.texts, outcome.texts, "an oracle's lengths")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", TRUSTED, ids=str)
@given(data=st.data(), weights=seeds)
@settings(max_examples=2)
def test_caches_hold_what_a_fresh_prefill_of_the_text_gives(rule, shape, data, weights):
    kind = "parallel" if rule in ("gate", "all") else "own"
    model = with_random_heads(shape.model, kind, shape.gamma, weights, unrolled=shape.unrolled)
    batch = data.draw(batches(shape))
    drafter = Trusting(drafter=heads_drafter(model, shape.gamma, shape.window, shape.sink), rule=rule, tau=0.2)
    outcome = trusted(model, drafter, batch, steps=2)
    # The tokens emitted last are not yet read: the pending one, and those that were taken with it.
    unread = 1 + np.asarray(outcome.state.draft.count)
    texts = [text[: len(text) - own] for text, own in zip(outcome.texts, unread, strict=True)]
    read = [[*prompt, *text] for prompt, text in zip(batch.prompts, texts, strict=True)]
    np.testing.assert_array_equal(outcome.state.length, [len(row) for row in read])
    again = replace(batch, requests=[replace_prompt(r, row) for r, row in zip(batch.requests, read, strict=True)])
    fresh = prefilled(model, Plain(), again)
    assert_same_target_state(replace(outcome.state, pending=fresh.pending), fresh)


@pytest.mark.parametrize("kind", ["own", "recurrent"])
@given(data=st.data(), weights=seeds)
@settings(max_examples=4)
def test_an_mtp_head_that_is_trusted_drafts_from_every_entry_it_has(kind, data, weights):
    shape = replace(SHAPES[0], window=40, sink=0)
    model = with_random_heads(shape.model, kind, shape.gamma, weights)
    batch = data.draw(batches(shape))
    inner = heads_drafter(model, shape.gamma, shape.window, shape.sink)
    outcome = trusted(model, Trusting(drafter=inner, rule="clp", tau=0.2), batch)
    ring, count = outcome.state.draft.draft, np.asarray(outcome.state.draft.count)
    for row, (request, text) in enumerate(zip(batch.requests, outcome.texts, strict=True)):
        tokens = jnp.asarray([[*request.prompt, *text[: len(text) - count[row]]]])
        # Entry i is made from the state after token i and the token that follows it, whoever wrote that.
        entries = model.mtp.entries(model.sequence(tokens[:, :-1]), model.embed(tokens[:, 1:]))
        keys, values = model.mtp.keys_values(entries, jnp.arange(entries.shape[1])[None])
        held = readable_entries(ring, row, int(outcome.state.length[row]))
        read = np.arange(entries.shape[1])[-len(held[0]) :]
        # The newest is made anew by every draft, also for a row that is done.
        np.testing.assert_allclose(held[0][:-1], keys[0, read[:-1]], atol=1e-4)
        np.testing.assert_allclose(held[1][:-1], values[0, read[:-1]], atol=1e-4)


def replace_prompt(request, prompt):
    """The same request for another prompt, with room for one token."""
    return request._replace(prompt=prompt, limit=1)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_is_trusted_the_same_alone_and_in_a_batch(rule):
    shape = SHAPES[0]
    model = with_random_heads(shape.model, "parallel", shape.gamma, 5)
    requests = [([3, 1, 4, 1, 5], 20), ([2, 7], 11), ([8, 2, 8, 1, 8, 2, 8], 15)]
    batch = Batch(shape, [Request(prompt, limit, -1, SamplingParams()) for prompt, limit in requests])
    drafter = Trusting(drafter=HeadsDrafter(gamma=shape.gamma), rule=rule, tau=0.2)
    together = trusted(model, drafter, batch)
    assert [len(text) for text in together.texts] == [20, 11, 15]
    for row, request in enumerate(batch.requests):
        alone = Batch(replace(shape, rows=1), [request])
        assert trusted(model, drafter, alone).texts[0] == together.texts[row]


def test_all_takes_everything():
    shape = SHAPES[0]
    model = with_random_heads(shape.model, "residual", shape.gamma, 1)
    batch = Batch(replace(shape, rows=1), [Request([3, 1, 4], 21, -1, SamplingParams())])
    outcome = trusted(model, Trusting(drafter=HeadsDrafter(gamma=3), rule="all"), batch)
    assert outcome.accepted.tolist() == [0, 0, 0, 5]
