"""The models give the logits and the greedy text of Hugging Face transformers, from the same checkpoint folders."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.hf_models import VOCAB, hf_greedy, hf_logits, randomize, save_checkpoint, tiny_model
from tests.models.mtp_oracle import torch_mtp
from wmtp_jax import generate, load, logits

TOLERANCE = 1e-4
VERIFIED = 4
LENGTHS = [1, 2, VERIFIED, 63, 64, 65, 150]

_YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=4096)
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
_LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=3.0)
_MROPE = dict(partial_rotary_factor=0.25, mrope_section=[1, 1, 1], mrope_interleaved=True)


class Case(NamedTuple):
    """``changes`` to the family's config, and how its checkpoint is laid out."""

    family: str
    changes: Mapping[str, Any] = MappingProxyType({})
    layout: Mapping[str, Any] = MappingProxyType({})


_TWO = dict(full_attention_interval=2, num_hidden_layers=4)
CASES = {
    "qwen3.5 dense": Case("Qwen3_5"),
    "qwen3.5 dense, nested, tied, yarn": Case(
        "Qwen3_5",
        dict(tie_word_embeddings=True, max_position_embeddings=16384, rope_parameters=_YARN | _MROPE),
        dict(nested=True),
    ),
    "qwen3.5 moe, one tensor an expert": Case("Qwen3_5Moe", _TWO),
    "qwen3.5 moe, packed and nested": Case("Qwen3_5Moe", _TWO, dict(packed=True, nested=True)),
    "qwen3-next": Case("Qwen3Next", _TWO),
    "nemotron": Case("NemotronH"),
    "nemotron, packed": Case("NemotronH", dict(hybrid_override_pattern="ME*E", use_bias=True), dict(packed=True)),
    "nemotron, dense, experts in the head alone": Case(
        "NemotronH", dict(hybrid_override_pattern="M-M*-M-", moe_latent_size=None, use_conv_bias=False)
    ),
    "qwen2, yarn": Case("Qwen2", dict(max_position_embeddings=16384, rope_parameters=_YARN)),
    "qwen2, tied, linear": Case("Qwen2", dict(tie_word_embeddings=True, rope_parameters=_LINEAR)),
    "llama": Case("Llama"),
    "llama, biases": Case("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama, tied, llama3": Case("Llama", dict(tie_word_embeddings=True, rope_parameters=_LLAMA3), dict(old_rope=True)),
}
# Recurrent layers take lengths in different ways, so one model of each kind is compiled for each and the others padded.
EXACT = ("qwen3.5 dense", "nemotron")
# Tied heads, biases and too few layers make a random model repeat one token for ever.
LIVELY = [name for name in CASES if not any(part in name for part in ("tied", "biases", "nemotron,"))]


@pytest.fixture(scope="module", params=CASES)
def models(request, tmp_path_factory):
    """The Hugging Face model, ours read from the folder the first one was saved to, and whether to pad its prompts."""
    case = CASES[request.param]
    model = tiny_model(case.family, **case.changes)
    head = randomize(torch_mtp(model), 1) if case.family.startswith(("Qwen3", "Nemotron")) else None
    folder = save_checkpoint(model, tmp_path_factory.mktemp("checkpoint"), mtp=head, **case.layout)
    return model, load(folder, dtype="float32"), request.param not in EXACT


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_those_of_hugging_face_at_every_position(models, length):
    theirs, ours, padded = models
    tokens = np.random.default_rng(length).integers(0, VOCAB, (2, length))
    padding = max(LENGTHS) - length if padded else 0
    found = logits(ours, np.pad(tokens, ((0, 0), (0, padding))))[:, :length]
    np.testing.assert_allclose(found, hf_logits(theirs, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("models", LIVELY, indirect=True)
def test_64_greedy_tokens_equal_those_of_hugging_face(models):
    theirs, ours, _ = models
    prompts = np.random.default_rng(7).integers(0, VOCAB, (2, 9))
    tokens, leads = hf_greedy(theirs, prompts, 64)
    assert leads.min() > 2 * TOLERANCE, "the oracle's text hangs on rounding: choose other prompts"
    assert len(np.unique(tokens)) > 8, "the oracle's text repeats itself: choose another model"
    drafting = dict(gamma=VERIFIED - 1, window=8, sink=2) if ours.config.has_mtp else dict(gamma=0)
    found = generate(ours, prompts.tolist(), max_new_tokens=64, page_size=16, chunk=8, **drafting)
    np.testing.assert_array_equal(found.tokens, tokens)
