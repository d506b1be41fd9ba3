"""Unstacked parameters are the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.models.decoder import unroll


@pytest.mark.parametrize("name", ["hybrid", "attention"])
def test_an_unrolled_model_computes_the_same_and_frees_the_stack(name):
    model = tiny_model(name, seed=3)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIGS[name].vocab_size, (2, 11)))
    stacked = jax.tree.leaves(model.blocks)
    logits = jax.jit(lambda m, x: m.logits(m.sequence(x)))
    expected = logits(model, tokens)
    flat = unroll(model)
    np.testing.assert_allclose(logits(flat, tokens), expected, atol=1e-4)
    assert len(flat.blocks) == CONFIGS[name].num_periods
    assert all(leaf.is_deleted() for leaf in stacked)
