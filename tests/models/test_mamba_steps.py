"""Nemotron's step sizes: Hugging Face bounds them from below in prefill and not in decoding; here they are one rule."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import load_hf
from tests.hf_models import VOCAB, hf_logits, save_checkpoint, tiny_model, torch
from wmtp_jax.models.decoder import abstract
from wmtp_jax.models.parameters import named_parameters, with_parameters

# Half of the random models' steps are below it.
BOUND = 0.5
TOLERANCE = 1e-4
logits = jax.jit(lambda decoder, tokens: decoder.logits(decoder.sequence(tokens)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Hugging Face model that bounds steps, and its weights here without a bound and with it."""
    theirs = tiny_model("NemotronH", hybrid_override_pattern="MEM*", time_step_min=BOUND)
    folder = save_checkpoint(theirs, tmp_path_factory.mktemp("checkpoint"))
    config, free = load_hf(folder, dtype=jnp.float32)
    bounded = replace(config, mamba=replace(config.mamba, min_step=BOUND))
    return theirs, free, with_parameters(abstract(bounded), named_parameters(free))


def test_conversion_sets_no_bound(models):
    assert models[1].config.mamba.min_step == 0


def test_with_the_bound_logits_are_those_of_a_hugging_face_prefill(models):
    theirs, free, bounded = models
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 40))
    expected = hf_logits(theirs, tokens)
    np.testing.assert_allclose(logits(bounded, tokens), expected, rtol=0, atol=TOLERANCE)
    assert np.abs(np.asarray(logits(free, tokens)) - expected).max() > 100 * TOLERANCE


def test_without_the_bound_logits_are_those_of_hugging_face_token_by_token(models):
    theirs, free, bounded = models
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 20))
    expected = _token_by_token(theirs, tokens)
    np.testing.assert_allclose(logits(free, tokens), expected, rtol=0, atol=TOLERANCE)
    assert np.abs(np.asarray(logits(bounded, tokens)) - expected).max() > 100 * TOLERANCE


@torch.no_grad()
def _token_by_token(model, tokens: np.ndarray) -> np.ndarray:
    """Logits of a model that reads one token a call. The first call is a prefill, whose bound is taken away."""
    mixers = [m for m in model.modules() if hasattr(m, "time_step_limit")]
    cache, found = None, []
    for token in torch.tensor(tokens).T:
        for mixer in mixers:
            mixer.time_step_limit = (0.0 if cache is None else BOUND, float("inf"))
        out = model(token[:, None], cache=cache, use_cache=True)
        cache = out.cache
        found.append(out.logits[:, 0])
    return torch.stack(found, dim=1).numpy()
