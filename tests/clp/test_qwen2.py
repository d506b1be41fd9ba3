"""Heads on Qwen2.5-shaped backbones from Hugging Face folders: biased projections, tied and untied output heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wmtp_jax as wmtp
from tests.checkpoints_convert.folders import config_of, random_tensors, write
from wmtp_jax.clp.store import HEADS_NAME, draft_vocabulary, load_heads, save_heads
from wmtp_jax.train.head_data import Collected, Sequences, frequent_tokens
from wmtp_jax.train.head_run import HeadRun, heads_config
from wmtp_jax.train.head_trainer import HeadTraining, initial_heads, train_heads

pytestmark = pytest.mark.slow
K = 2


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    config = config_of(
        "qwen2", tie_word_embeddings=request.param == "tied", sliding_window=131072, use_sliding_window=False
    )
    tensors = {name: 0.4 * x for name, x in random_tensors(config).items()}
    return write(tmp_path_factory.mktemp("qwen2"), config, {n: x.astype("bfloat16") for n, x in tensors.items()})


@pytest.fixture(scope="module")
def greedy(folder):
    """The backbone's own texts after random prompts, which is what its heads are to foresee, and its states."""
    model, rng = wmtp.load(folder), np.random.default_rng(0)
    prompts = rng.integers(10, 61, (40, 6)).tolist()
    answers = wmtp.generate(model, prompts, gamma=0, max_new_tokens=18, ignore_eos=True).tokens
    tokens = np.array([[*p, *a] for p, a in zip(prompts, answers, strict=True)], np.int32)
    hidden = jax.jit(lambda m, x: m.sequence(x))(model.decoder, jnp.asarray(tokens)).astype(jnp.bfloat16)
    return Collected(Sequences(tokens, np.arange(24) >= np.full((40, 1), 6)), np.asarray(hidden).view(np.uint16))


@pytest.mark.parametrize(
    ("folder", "kind", "draft_vocab"),
    [("tied", "parallel", 0), ("tied", "recurrent", 30), ("untied", "residual", 0), ("untied", "recurrent", 0)],
    indirect=["folder"],
)
def test_heads_learn_the_text_and_verified_ones_leave_it_as_it_is(kind, draft_vocab, folder, greedy, tmp_path):
    model = wmtp.load(folder)
    config = heads_config(model.decoder, HeadRun(kind=kind, k=K, draft_vocab=draft_vocab))
    ids = frequent_tokens(greedy.sequences, draft_vocab, 61)
    training = HeadTraining(epochs=20, rows=8, learning_rate=1e-2, warmup=5, predictor_epochs=3)
    rows: list = []
    heads = train_heads(
        model.decoder, initial_heads(config, model.decoder, 0), draft_vocabulary(model.decoder, ids), greedy, training,
        tmp_path / "run", rows.append,
    )  # fmt: skip
    losses = [row["loss"][0] for row in rows if "loss" in row]
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    save_heads(heads, ids, tmp_path / HEADS_NAME, {})
    drafting = wmtp.load(folder, heads=tmp_path)
    prompts = greedy.sequences.tokens[:3, :6].tolist()
    asked = dict(max_new_tokens=18, ignore_eos=True)
    verified = [wmtp.generate(drafting, prompts, gamma=gamma, **asked) for gamma in (K, "auto")]
    for out in verified:
        np.testing.assert_array_equal(out.tokens, greedy.sequences.tokens[:3, 6:])
    # These were learned by heart, as far as the heads can write them.
    assert verified[0].stats.acceptance_length > (1.5 if draft_vocab == 0 else 1.2)
    trusted = wmtp.generate(drafting, prompts, gamma=K, accept="clp", **asked)
    assert [len(tokens) for tokens in trusted.tokens] == [18] * 3


@pytest.mark.parametrize("folder", ["tied", "untied"], indirect=True)
def test_heads_of_all_tokens_share_the_output_head(folder, tmp_path):
    model = wmtp.load(folder).decoder
    config = heads_config(model, HeadRun(kind="residual", k=K))
    save_heads(initial_heads(config, model, 0), None, tmp_path / HEADS_NAME, {})
    _, vocabulary = load_heads(tmp_path, model)
    own = model.embedding if model.lm_head is None else model.lm_head.kernel
    assert vocabulary.kernel[...].unsafe_buffer_pointer() == own[...].unsafe_buffer_pointer()
    hidden = jnp.asarray(np.random.default_rng(1).standard_normal((3, 24)), jnp.float32)
    np.testing.assert_allclose(vocabulary.logits(hidden), model.logits(hidden), atol=1e-5)
