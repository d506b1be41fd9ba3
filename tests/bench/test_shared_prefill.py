"""Prompts read once for several drafters leave each of them what it would have read alone."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.bench.folders import tiny
from wmtp_jax.bench.shared_prefill import SharedPrefill
from wmtp_jax.decode.drafter import Drafter, MTPDrafter, Plain
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.prefill import prefill, start_state
from wmtp_jax.decode.sampling import batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.parameters import pack

PROMPTS = [[3, 17, 40, 8, 25, 11, 0, 30, 29], [22, 5, 41, 13]]
SAMPLING = batch_sampling([SamplingParams()] * 2)
STOPS = jnp.full((2, 1), -1)
DRAFTERS = (Plain(), MTPDrafter(gamma=2, window=5, sink=1), MTPDrafter(gamma=2))


def read(drafter: Drafter) -> DecodeState:
    model = tiny().decoder
    state = start_state(model, drafter, PROMPTS, [20, 20], page_size=16, dtype=jnp.float32, penalized=False)
    return prefill(model, drafter, state, PROMPTS, SAMPLING, STOPS, chunk=4)


def test_a_state_read_together_is_the_state_read_alone_and_outlives_its_use() -> None:
    shared = SharedPrefill(drafters=DRAFTERS)
    assert shared.gamma == 2
    state = read(shared)
    for drafter in (DRAFTERS[1], DRAFTERS[0], *DRAFTERS):
        alone, together = read(drafter), shared.state_of(drafter, state)
        assert jax.tree.structure(alone) == jax.tree.structure(together)
        for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(one, other, atol=3e-6)
        if drafter == DRAFTERS[1]:
            decode(pack(tiny().decoder), drafter, together, SAMPLING, STOPS, 1)
            assert together.cache.keys.is_deleted()
