"""A lone bfloat16 token, which on a CPU is computed beside a copy of itself: the copy leaves nothing behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import tiny_model
from wmtp_jax.decode.drafter import Plain
from wmtp_jax.decode.loop import commit, verify
from wmtp_jax.decode.prefill import prefill, start_state
from wmtp_jax.decode.sampling import batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams


@pytest.mark.parametrize("name", ["hybrid", "mamba", "attention"])
def test_one_token_is_committed_and_no_more(name):
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tiny_model(name, 0))
    prompt, sampling, stops = [[3, 1, 4, 1, 5]], batch_sampling([SamplingParams()]), jnp.full((1, 1), -1)
    made = dict(page_size=16, dtype=jnp.bfloat16, penalized=False)
    state = start_state(model, Plain(), prompt, [9], **made)
    state = prefill(model, Plain(), state, prompt, sampling, stops, chunk=8)
    run, end = jax.jit(verify), jax.jit(commit)
    none = jnp.zeros((1, 0), jnp.int32)
    alone = run(model, state, none, sampling)
    assert alone.choices.shape == (1, 1)
    assert alone.hidden.shape == (1, 1, model.config.hidden_size)
    # Five tokens of the prompt and this one are in the cache; the position behind them is as it was.
    keys = np.asarray(alone.cache.keys)
    assert keys[:, :, 5].any()
    assert not keys[:, :, 6:].any()
    after, count = end(state, none, None, alone, stops)
    assert (int(after.length[0]), int(count[0])) == (6, 1)
    # The draft after it is wrong, so that beside it, too, one token is committed.
    wrong = (alone.choices + 1) % model.config.vocab_size
    beside, count = end(state, wrong, None, run(model, state, wrong, sampling), stops)
    assert int(count[0]) == 1
    for one, two in zip(jax.tree.leaves(after.recurrent), jax.tree.leaves(beside.recurrent), strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(two), rtol=0.05, atol=0.02)
