import json

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints_convert.convert
import checkpoints_convert.values
import wmtp_jax.checkpoint
from checkpoints_convert import load_hf
from checkpoints_convert.convert import convert
from tests.checkpoints_convert.folders import (
    CONFIGS,
    assert_same_model,
    config_of,
    per_expert_names,
    random_tensors,
    write,
    write_kind,
)
from wmtp_jax.checkpoint import load_checkpoint


@pytest.fixture
def tiny_pieces(monkeypatch):
    """Cuts parameters, parts and loading batches as a checkpoint of hundreds of gigabytes would be."""
    monkeypatch.setattr(checkpoints_convert.values, "PIECE_BYTES", 2000)
    monkeypatch.setattr(checkpoints_convert.convert, "PART_BYTES", 20000)
    monkeypatch.setattr(wmtp_jax.checkpoint, "BATCH_BYTES", 10000)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, jnp.bfloat16) for kind in CONFIGS), ("dense", jnp.float32)])
def test_converting_and_loading_gives_the_same_bits_as_loading_directly(tmp_path, kind, dtype):
    source = write_kind(tmp_path / "hf", kind)
    convert(source, tmp_path / "out", dtype=dtype)
    config, direct = load_hf(source, dtype=dtype)
    converted_config, converted = load_checkpoint(tmp_path / "out", dtype=dtype)
    assert converted_config == config
    assert_same_model(direct, converted)


@pytest.mark.usefixtures("tiny_pieces")
def test_parameters_cut_into_pieces_come_back_whole(tmp_path):
    source = write(tmp_path / "hf", CONFIGS["next"], random_tensors(CONFIGS["next"], per_expert_names()), shards=3)
    convert(source, tmp_path / "out")
    index = json.loads((tmp_path / "out/params/index.json").read_text())["parameters"]
    assert len(index["embedding"]["pieces"]) > 1
    assert len(index["lm_head.kernel"]["pieces"]) > 1
    assert len(list((tmp_path / "out/params").iterdir())) > 3
    _, direct = load_hf(source, dtype=jnp.bfloat16)
    assert_same_model(direct, load_checkpoint(tmp_path / "out", dtype=jnp.bfloat16)[1])


def test_every_tensor_is_in_its_place(tmp_path):
    """Read back by hand from the stored names, for one parameter of each layout."""
    source = write_kind(tmp_path, "moe")
    stored = {name: x.astype(np.float32) for name, x in random_tensors(CONFIGS["moe"]).items()}
    _, model = load_hf(source, dtype=jnp.float32)

    def equal(parameter, expected):
        np.testing.assert_array_equal(np.asarray(parameter[...]), expected)

    equal(model.embedding, stored["model.embed_tokens.weight"])
    assert model.lm_head is not None
    assert model.mtp is not None
    equal(model.lm_head.kernel, stored["lm_head.weight"].T)
    equal(model.mtp.fc.kernel, stored["mtp.fc.weight"].T)
    # One period of eight blocks: layers 0 to 3, mixer then feed-forward.
    delta, experts, attention = (model.blocks[i].mixer for i in (4, 5, 6))
    equal(delta.conv_kernel, stored["model.layers.2.linear_attn.conv1d.weight"][:, 0].T[None])
    equal(delta.A_log, stored["model.layers.2.linear_attn.A_log"][None])
    equal(attention.q_proj.kernel, stored["model.layers.3.self_attn.q_proj.weight"].T[None])
    equal(experts.gate_up_proj, stored["model.layers.2.mlp.experts.gate_up_proj"].swapaxes(1, 2)[None])
    equal(experts.router.kernel, stored["model.layers.2.mlp.gate.weight"].T[None])


@pytest.mark.parametrize(("backbone", "mtp"), [(True, False), (False, True), (True, True)])
def test_experts_stored_one_by_one_give_the_model_of_packed_ones(tmp_path, backbone, mtp):
    packed = random_tensors(CONFIGS["moe"])
    split = dict(packed)
    layers = [f"model.layers.{i}." for i in range(4)] * backbone + ["mtp.layers.0."] * mtp
    for prefix in (f"{layer}mlp.experts." for layer in layers):
        gate_up, down = split.pop(f"{prefix}gate_up_proj"), split.pop(f"{prefix}down_proj")
        for e in range(5):
            split[f"{prefix}{e}.gate_proj.weight"] = gate_up[e, :10].copy()
            split[f"{prefix}{e}.up_proj.weight"] = gate_up[e, 10:].copy()
            split[f"{prefix}{e}.down_proj.weight"] = down[e].copy()
    a = load_hf(write(tmp_path / "packed", CONFIGS["moe"], packed))[1]
    b = load_hf(write(tmp_path / "split", CONFIGS["moe"], split))[1]
    assert_same_model(a, b)


def test_fused_projections_give_the_model_of_unfused_ones(tmp_path):
    """Row by row: key head k holds its query, its key, the values of its value heads, then their gates."""
    unfused = random_tensors(CONFIGS["moe"])
    fused = dict(unfused)
    for prefix in (f"model.layers.{i}.linear_attn." for i in range(3)):
        qkv, z, b, a = (fused.pop(f"{prefix}in_proj_{n}.weight") for n in ("qkv", "z", "b", "a"))
        q, k, v = qkv[:16].reshape(2, 8, 24), qkv[16:32].reshape(2, 8, 24), qkv[32:].reshape(6, 12, 24)
        z = z.reshape(6, 12, 24)
        rows, gates = [], []
        for head in range(2):
            own = range(3 * head, 3 * head + 3)
            rows += [*q[head], *k[head], *(r for h in own for r in v[h]), *(r for h in own for r in z[h])]
            gates += [*(b[h] for h in own), *(a[h] for h in own)]
        fused[f"{prefix}in_proj_qkvz.weight"], fused[f"{prefix}in_proj_ba.weight"] = np.stack(rows), np.stack(gates)
    following = {**CONFIGS["moe"]["text_config"], "architectures": ["Qwen3NextForCausalLM"]}
    a = load_hf(write(tmp_path / "unfused", CONFIGS["moe"], unfused))[1]
    b = load_hf(write(tmp_path / "fused", following, fused))[1]
    assert_same_model(a, b)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_the_same_tensors_under_any_prefix_give_the_same_model(tmp_path, prefix):
    plain = random_tensors(CONFIGS["dense"])
    renamed = {prefix + name.removeprefix("model.") if "model." in name else name: x for name, x in plain.items()}
    a = load_hf(write(tmp_path / "plain", CONFIGS["dense"], plain))[1]
    b = load_hf(write(tmp_path / "renamed", CONFIGS["dense"], renamed, shards=2))[1]
    assert_same_model(a, b)


def test_float16_and_float32_weights_are_rounded_once(tmp_path):
    tensors = {name: x.astype(np.float16) for name, x in random_tensors(CONFIGS["llama"]).items()}
    exact = {name: x.astype(np.float32) for name, x in tensors.items()}
    a = load_hf(write(tmp_path / "half", CONFIGS["llama"], tensors), dtype=jnp.bfloat16)[1]
    b = load_hf(write(tmp_path / "single", CONFIGS["llama"], exact), dtype=jnp.bfloat16)[1]
    assert_same_model(a, b)


def test_the_draft_head_can_be_left_out(tmp_path):
    source = write_kind(tmp_path / "hf", "dense")
    report = convert(source, tmp_path / "out", no_mtp=True)
    assert not report.has_mtp
    assert len(report.skipped) == 15
    config, model = load_checkpoint(tmp_path / "out")
    assert not config.has_mtp
    assert model.mtp is None


def test_vision_tensors_rope_tables_and_an_equal_tied_head_are_skipped_and_reported(tmp_path):
    extra = {
        "model.visual.patch_embed.proj.weight": np.ones((4, 3), np.float32),
        "model.layers.3.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }

    def edit(tensors):
        tensors |= extra | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}

    report = convert(write_kind(tmp_path / "hf", "dense", edit), tmp_path / "out")
    assert report.skipped.keys() == {*extra, "lm_head.weight"}


def test_tokenizer_template_and_every_end_id_travel_along(tmp_path):
    source = write_kind(tmp_path / "hf", "dense")
    special = [{"id": 5, "content": "<|im_end|>"}]
    files = {
        "tokenizer.json": json.dumps({"added_tokens": special}),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}),
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": json.dumps({"eos_token_id": [3, 7]}),
    }
    for name, text in files.items():
        (source / name).write_text(text)
    report = convert(source, tmp_path / "out")
    assert report.warnings == ()
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files
    assert (tmp_path / "out/config.json").read_text() == (source / "config.json").read_text()
    assert load_checkpoint(tmp_path / "out")[0].eos_ids == (7, 3, 5)


def test_a_folder_without_a_tokenizer_converts_with_a_warning(tmp_path):
    report = convert(write_kind(tmp_path / "hf", "llama"), tmp_path / "out")
    assert len(report.warnings) == 1
    assert "no tokenizer" in report.warnings[0]


def test_next_without_a_word_on_its_draft_head_still_gets_it(tmp_path):
    config = config_of("next", mtp_num_hidden_layers=None)
    source = write(tmp_path / "hf", config, random_tensors(CONFIGS["next"], per_expert_names()))
    assert load_hf(source)[0].has_mtp
