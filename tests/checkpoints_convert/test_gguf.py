"""GGUF files convert to the model that they were made from, to the last bit of what they store."""

import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoints_convert.gguf_file
import checkpoints_convert.values
import wmtp_jax
from checkpoints_convert import load_hf
from checkpoints_convert.convert import convert
from checkpoints_convert.families import find_family
from checkpoints_convert.gguf_file import GgufFile
from checkpoints_convert.summary import inspect
from tests.checkpoints_convert.folders import assert_same_model, write
from tests.checkpoints_convert.gguf_files import (
    BF16,
    F16,
    F32,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    Q4_1,
    Q8_0,
    VOCAB,
    metadata_of,
    mixed,
    paired,
    random_tensors,
    stored_tensors,
    width_of,
    write_gguf,
    write_small,
)
from wmtp_jax.checkpoint import load_checkpoint
from wmtp_jax.cli.main import run
from wmtp_jax.errors import UserError

# Whole numbers and doubles are never weights.
NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64")
TYPES = [k for k in gguf.GGMLQuantizationType if k in gguf.GGML_QUANT_SIZES and k.name not in NO_WEIGHTS]


def hf_config(architecture, **changes):
    """The config.json of the small model, by hand."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    return dict(
        architectures=[names[architecture]],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=width_of(architecture),
        rms_norm_eps=float(np.float32(1e-5)),
        max_position_embeddings=512,
        rope_theta=50000.0,
    ) | changes  # fmt: skip


def save(path, architecture, tensors, type_of=lambda name, values: F32, **changes):
    return write_gguf(
        path, architecture, metadata_of(architecture, **changes), stored_tensors(architecture, tensors), type_of
    )


@pytest.mark.parametrize(
    ("architecture", "tied", "bias"),
    [("llama", False, False), ("llama", True, True), ("qwen2", False, False), ("qwen2", True, False)],
)
def test_a_file_gives_the_model_of_the_folder_that_it_was_made_from(tmp_path, architecture, tied, bias):
    tensors = random_tensors(architecture, tied=tied, bias=bias)
    convert(save(tmp_path / "x.gguf", architecture, tensors), tmp_path / "out", dtype="float32")
    config = hf_config(architecture, tie_word_embeddings=tied, attention_bias=bias)
    direct_config, direct = load_hf(write(tmp_path / "hf", config, tensors), dtype=jnp.float32)
    converted_config, converted = load_checkpoint(tmp_path / "out", dtype=jnp.float32)
    assert converted_config == direct_config
    assert_same_model(direct, converted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_cut_into_pieces_are_those_read_whole(tmp_path, monkeypatch, dtype):
    path = save(tmp_path / "x.gguf", "llama", random_tensors("llama"), mixed(Q8_0, Q4_1, F16, BF16))
    convert(path, tmp_path / "whole", dtype=dtype)
    monkeypatch.setattr(checkpoints_convert.values, "PIECE_BYTES", 2000)
    monkeypatch.setattr(checkpoints_convert.gguf_file, "_CHUNK", 100)
    convert(path, tmp_path / "cut", dtype=dtype)
    whole, cut = (load_checkpoint(tmp_path / name, dtype=jnp.dtype(dtype))[1] for name in ("whole", "cut"))
    assert_same_model(whole, cut)


ORACLES = {
    "llama": ("llama", False, mixed(F32)),
    "llama, tied, Q8_0": ("llama", True, mixed(Q8_0)),
    "llama, mixed": ("llama", False, mixed(Q4_1, F16, Q8_0, BF16)),
    "qwen2, mixed": ("qwen2", False, mixed(Q8_0, Q4_1)),
    "qwen2, tied, F16": ("qwen2", True, mixed(F16)),
}


@pytest.mark.parametrize("case", ORACLES)
def test_logits_are_those_of_transformers_from_the_same_file(tmp_path, case):
    torch = pytest.importorskip("torch", reason="the oracle is Hugging Face transformers on torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is Hugging Face transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    architecture, tied, type_of = ORACLES[case]
    path = save(tmp_path / "x.gguf", architecture, random_tensors(architecture, tied=tied), type_of)
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="x.gguf")
    oracle = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=oracle)["tensors"]
    missing = oracle.load_state_dict(weights, strict=False)
    assert missing.missing_keys == (["lm_head.weight"] if tied else [])
    assert missing.unexpected_keys == []
    oracle.tie_weights()
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 70))
    with torch.no_grad():
        expected = oracle(torch.tensor(ids)).logits.numpy()
    convert(path, tmp_path / "out", dtype="float32")
    found = wmtp_jax.logits(wmtp_jax.load(tmp_path / "out", dtype="float32"), ids)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-4)


def raw_file(path, kind, rows=7, blocks=3):
    """A file with one tensor of any type, of random bytes; and its bytes."""
    values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    codes = np.random.default_rng(0).integers(0, 256, (rows, blocks * block_bytes), np.uint8)
    if kind in (F32, F16, BF16):
        wide = np.random.default_rng(0).normal(size=(rows, blocks * values)).astype(np.float32)
        codes = gguf.quantize(wide, kind).view(np.uint8).reshape(rows, -1)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata_of("llama", block_count=1).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    writer.add_tensor("odd", codes, raw_shape=(rows, blocks * block_bytes), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return codes


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_that_the_library_decodes_reads_the_same_row_by_row(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(checkpoints_convert.gguf_file, "_CHUNK", 600)
    codes = raw_file(tmp_path / "x.gguf", kind)
    try:
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(codes, kind)
    except NotImplementedError:
        with GgufFile(tmp_path / "x.gguf") as files:
            assert "does not decode" in files.quantized["odd"].faults[0]
        return
    with GgufFile(tmp_path / "x.gguf") as files:
        assert "odd" not in files.quantized or not files.quantized["odd"].faults
        for start, stop in ((0, 7), (0, 1), (1, 2), (3, 7), (2, 5), (6, 7), (4, 4)):
            found = files.read("odd", start, stop).astype(np.float32)
            np.testing.assert_array_equal(found, expected[start:stop])


@pytest.fixture(scope="module")
def biased_file(tmp_path_factory):
    return save(tmp_path_factory.mktemp("biased") / "x.gguf", "llama", random_tensors("llama", bias=True), mixed(Q8_0))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rows_of_queries_and_keys_are_the_same_rows_of_the_original(biased_file, data):
    leaf = data.draw(st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj"]))
    name = f"model.layers.1.self_attn.{leaf}.{data.draw(st.sampled_from(['weight', 'bias']))}"
    original = random_tensors("llama", bias=True)[name]
    if original.ndim == 2:
        kind = F16 if leaf == "o_proj" else Q8_0
        original = gguf.dequantize(gguf.quantize(original, kind), kind)
    start = data.draw(st.integers(0, len(original)))
    stop = data.draw(st.integers(start, len(original)))
    with GgufFile(biased_file) as files:
        np.testing.assert_array_equal(files.read(name, start, stop), original[start:stop])


def llama3_factors(theta=50000.0, factor=8.0, width=HEAD_DIM):
    """As llama.cpp's converter writes them."""
    factors = []
    for frequency in 1.0 / (theta ** (np.arange(0, width, 2, dtype=np.float32) / width)):
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else between)
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("changes", "factors", "rope"),
    [
        ({}, None, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 3.0}, None, {"rope_type": "linear", "factor": 3.0}),
        ({"rope__scale_linear": 3.0}, None, {"rope_type": "linear", "factor": 3.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
            | {"rope__scaling__original_context_length": 128},
            None,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        (
            {},
            llama3_factors(),
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
            | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        ({}, np.ones(HEAD_DIM // 2, np.float32), None),
    ],
    ids=["plain", "none", "linear", "old linear", "yarn", "llama3", "factors of one"],
)  # fmt: skip
def test_rope_scaling_is_that_of_the_config_json_it_was_made_from(tmp_path, changes, factors, rope):
    def edit(stored):
        if factors is not None:
            stored["rope_freqs.weight"] = factors

    path = write_small(tmp_path / "x.gguf", "llama", edit, **changes)
    report = convert(path, tmp_path / "out")
    expected = hf_config("llama", rope_scaling=rope)
    assert load_checkpoint(tmp_path / "out")[0] == find_family(expected).parse_config(expected)
    assert list(report.skipped) == (["model.rotary_emb.inv_freq"] if factors is not None else [])


def test_end_ids_are_all_that_the_file_names(tmp_path):
    ids = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 7}
    convert(write_small(tmp_path / "x.gguf", metadata=ids), tmp_path / "out")
    assert load_checkpoint(tmp_path / "out")[0].eos_ids == (7, 9)


def test_inspecting_a_file_tells_what_the_converted_folder_tells(tmp_path):
    path = write_small(tmp_path / "x.gguf", type_of=mixed(Q8_0, Q4_1))
    convert(path, tmp_path / "out")
    before, after = inspect(path), inspect(tmp_path / "out")
    assert (before.pop("format"), after.pop("format")) == ("gguf", "converted")
    assert before["family"] == "Llama"
    assert before["stored_values"].keys() == {"Q8_0", "Q4_1", "F16", "F32"}
    for summary in (before, after):
        del summary["path"], summary["family"], summary["stored_values"]
    assert before == after


def test_a_folder_that_holds_one_file_alone_stands_for_it(tmp_path, capsys):
    path = write_small(tmp_path / "models/x.gguf")
    assert run(["convert", str(tmp_path / "models"), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "Llama"
    assert inspect(tmp_path / "models")["path"] == str(path)


def test_commands_that_take_a_model_say_to_convert_a_file_first(tmp_path, capsys):
    path = write_small(tmp_path / "models/x.gguf")
    for source in (path, path.parent):
        assert run(["generate", "a", "--model", str(source)]) == 2
        assert f"x.gguf: is a GGUF file: convert it first with `wmtp convert {path} OUT`" in capsys.readouterr().err
        with pytest.raises(UserError, match="convert it first"):
            load_hf(source)


def test_pairs_of_the_tests_are_those_of_llama_cpp():
    """The converter's own words: reshape(n_head, 2, rows // n_head // 2, ...).swapaxes(1, 2)."""
    assert paired(np.arange(12), 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
