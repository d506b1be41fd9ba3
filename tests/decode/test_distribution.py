"""Sampling at temperature 1 draws from the model's own distribution, whoever drafts: good drafts, bad ones, none."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tests.decode.drafters import SteeredDrafter
from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.decode.drafter import Plain
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.prefill import prefill, start_state
from wmtp_jax.decode.sampling import batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.models.parameters import pack

pytestmark = pytest.mark.slow
ROWS, VOCAB, PROMPT = 8192, CONFIGS["counted"].vocab_size, [3, 1, 4, 1]
STEERED = SteeredDrafter(gamma=2, window=2, sink=1)


def texts_of_three(drafter, drafts: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Three tokens [ROWS, 3] from neighboring seeds, and the acceptance histogram."""
    model, prompts = tiny_model("counted", 2), [PROMPT] * ROWS
    sampling = batch_sampling([SamplingParams(temperature=1.0, seed=seed) for seed in range(ROWS)])
    state = start_state(model, drafter, prompts, [3] * ROWS, page_size=4, dtype=jnp.float32, penalized=False)
    if drafts is not None:
        state = replace(state, draft=state.draft._replace(table=jnp.full_like(state.draft.table, drafts)))
    stops = jnp.full((ROWS, 1), -1)
    state = prefill(model, drafter, state, prompts, sampling, stops, chunk=4)
    first = np.asarray(state.pending)[:, None]
    state, emitted = decode(pack(model), drafter, state, sampling, stops, 2)
    assert bool(jnp.all(state.done))
    return np.concatenate([first, np.asarray(emitted.tokens)[:, :2]], axis=1), np.asarray(emitted.accepted)


def true_distribution() -> np.ndarray:
    """Probability of every text of three tokens, [V, V, V], from the softmax of recomputed sequences."""
    pairs = np.stack(np.meshgrid(np.arange(VOCAB), np.arange(VOCAB), indexing="ij"), axis=-1).reshape(-1, 2)
    tokens = np.concatenate([np.tile(PROMPT, (len(pairs), 1)), pairs], axis=1)
    model = tiny_model("counted", 2)
    logits = jax.jit(lambda model, tokens: model.logits(model.sequence(tokens)))(model, tokens)
    p = np.asarray(jax.nn.softmax(logits[:, len(PROMPT) - 1 :], axis=-1), np.float64)
    p = p.reshape(VOCAB, VOCAB, 3, VOCAB)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


def assert_follows(counts: np.ndarray, probability: np.ndarray) -> None:
    """Chi-square over the cells that expect five or more; the others are one cell."""
    expected, counts = probability.ravel() / probability.sum() * counts.sum(), counts.ravel()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 12
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


@pytest.mark.parametrize(
    ("drafter", "drafts"),
    [(Plain(), None), (STEERED, None), (STEERED, 2)],
    ids=["no drafts", "the head's drafts", "the same draft always"],
)
def test_short_texts_follow_the_models_own_distribution(drafter, drafts):
    texts, accepted = texts_of_three(drafter, drafts)
    counts = np.zeros((VOCAB,) * 3)
    np.add.at(counts, tuple(texts.T), 1)
    probability = true_distribution()
    assert_follows(counts.sum(axis=2), probability.sum(axis=2))
    assert_follows(counts.sum(axis=0), probability.sum(axis=0))
    assert_follows(counts, probability)
    if drafter is STEERED:
        assert accepted[1:].sum() > 0, "no draft was ever right: the claim would be about plain decoding"
        assert accepted[0] > 0, "no draft was ever wrong"
