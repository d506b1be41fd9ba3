"""A prompt is read in chunks, and nothing but its tokens decides the state.

What these claims cover of what goes wrong in speculative decoders: states that depend on the chunking, prompts as long
as a verified run taken for one, padded rows, draft keys that miss the prompt or pair a hidden state with the wrong
token at a chunk's edge, and a first token changed by drafting.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Float, Int

from tests.decode.drafters import UnwrappedDrafter
from tests.decode.driving import SHAPES, Batch, Request, prefilled, run
from tests.decode.recompute import assert_same_texts
from tests.decode.states import TOLERANCE, assert_same_drafts, assert_same_target_state, committed_pages
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.models.decoder import Decoder

pytestmark = pytest.mark.slow
SHAPE = SHAPES[0]
GAMMA = SHAPE.gamma
LENGTHS = [1, 2, GAMMA, GAMMA + 1, GAMMA + 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70]
seeds = st.integers(0, 2**20)


def prompts_of(lengths: list[int], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SHAPE.vocab, length).tolist() for length in lengths]


def batch_of(prompts: list[list[int]], chunk: int = SHAPE.chunk) -> Batch:
    shape = replace(SHAPE, rows=len(prompts), chunk=chunk)
    return Batch(shape, [Request(prompt, 3, -1, SamplingParams()) for prompt in prompts])


# What fits the pages of each row, room for a verified run and a few tokens left.
row_lengths = st.tuples(
    *(st.sampled_from([n for n in LENGTHS if n <= capacity - GAMMA - 4]) for capacity in SHAPE.capacities)
)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@given(lengths=row_lengths, seed=seeds)
@settings(max_examples=6)
def test_any_chunking_gives_the_same_state(chunk, lengths, seed):
    model, prompts = SHAPE.make(seed), prompts_of(lengths, seed)
    whole = prefilled(model, SHAPE.windowed, batch_of(prompts, chunk=LENGTHS[-1]))
    chunked = prefilled(model, SHAPE.windowed, batch_of(prompts, chunk=chunk))
    assert_same_target_state(chunked, whole)
    last_hidden = (state.committed.hidden[:, 0] for state in (chunked, whole))
    np.testing.assert_allclose(*last_hidden, atol=TOLERANCE, rtol=TOLERANCE)
    assert_same_drafts(model, chunked, whole, GAMMA, batch_of(prompts).sampling, [0, 1, 2])


@given(length=st.sampled_from([n for n in LENGTHS if n < 50]), seed=seeds)
@settings(max_examples=20)
def test_a_row_of_a_batch_is_read_and_continued_as_it_would_be_alone(length, seed):
    """Between a longer row, so that it is padded, and one of a single token, which is padded for it."""
    model, prompts = SHAPE.make(seed), prompts_of([70, length, 1], seed)
    together, alone = batch_of(prompts), batch_of(prompts[1:2])
    state, lone = (prefilled(model, SHAPE.windowed, batch) for batch in (together, alone))
    assert int(state.length[1]) == length
    for one, other in zip(state.recurrent, lone.recurrent, strict=True):
        np.testing.assert_allclose(one.memory[:, 1:2], other.memory, atol=TOLERANCE)
        np.testing.assert_allclose(one.tail[:, 1:2], other.tail, atol=TOLERANCE)
    for one, other in zip(committed_pages(state.cache, 1, length), committed_pages(lone.cache, 0, length), strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)
    texts = [run(model, SHAPE.windowed, alone).texts[0], run(model, SHAPE.windowed, together).texts[1]]
    assert_same_texts(model, together, [[], texts[0], []], [[], texts[1], []], "alone")


@given(lengths=row_lengths, seed=seeds)
@settings(max_examples=10)
def test_draft_keys_pair_each_hidden_state_with_the_token_after_it_across_chunks(lengths, seed):
    """Against the head applied to the hidden states of the whole sequence at once."""
    model, prompts = SHAPE.make(seed), prompts_of(lengths, seed)
    ring = prefilled(model, SHAPE.native, batch_of(prompts)).draft
    padded = np.zeros((len(prompts), SHAPE.capacity + 1), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    expected = _head_entries(model, padded)
    for row, prompt in enumerate(prompts):
        # The last token's entry waits for the token that follows it.
        known = len(prompt) - 1
        for held, like in zip((ring.keys, ring.values), expected, strict=True):
            np.testing.assert_allclose(held[row].swapaxes(0, 1)[:known], like[row, :known], atol=TOLERANCE)


@jax.jit
def _head_entries(model: Decoder, tokens: Int[Array, "B C+1"]) -> tuple[Float[Array, "B C K D"], ...]:
    assert model.mtp is not None
    entries = model.mtp.entries(model.sequence(tokens[:, :-1]), model.embed(tokens[:, 1:]))
    return model.mtp.keys_values(entries, jnp.broadcast_to(jnp.arange(entries.shape[1]), entries.shape[:2]))


@pytest.mark.parametrize(("window", "sink"), [(6, 2), (1, 0)])
def test_only_the_draft_entries_that_will_be_read_are_stored(window, sink):
    """Seen in a cache that gives every position a slot of its own."""
    drafter = UnwrappedDrafter(gamma=GAMMA, window=window, sink=sink)
    lengths = [70, 33, 5]
    ring = prefilled(SHAPE.make(0), drafter, batch_of(prompts_of(lengths, 0))).draft
    for held in (ring.keys, ring.values):
        stored = np.any(np.asarray(held) != 0, axis=(1, 3))
        for row, length in zip(stored, lengths, strict=True):
            expected = [p for p in range(length - 1) if p < sink or p >= length - window]
            assert np.flatnonzero(row).tolist() == expected
            assert row.sum() <= window + sink


def test_the_draft_window_does_not_change_what_the_target_reads():
    model, batch = SHAPE.make(1), batch_of(prompts_of([70, 40, 17], 1))
    assert_same_target_state(prefilled(model, SHAPE.windowed, batch), prefilled(model, SHAPE.native, batch))
