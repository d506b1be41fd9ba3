"""Every kind of damage: one clear UserError, and nothing written."""

import contextlib
import json
import shutil
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checkpoints_convert import load_hf
from checkpoints_convert.convert import convert
from checkpoints_convert.families import find_family
from checkpoints_convert.summary import inspect
from checkpoints_convert.tensor_files import DTYPES, TensorFolder
from tests.checkpoints_convert.folders import CONFIGS, config_of, write_kind
from wmtp_jax.checkpoint import load_checkpoint
from wmtp_jax.errors import UserError

NAME = "model.layers.1.mlp.up_proj.weight"


def refusal(folder, **options) -> str:
    """What a conversion of the folder says; it must leave nothing behind."""
    out = folder.parent / "refused" / "out"
    with pytest.raises(UserError) as error:
        convert(folder, out, **options)
    assert not out.parent.exists() or list(out.parent.iterdir()) == []
    return str(error.value)


def _narrow(tensors):
    tensors[NAME] = tensors[NAME][:, :-1].copy()


def _not_a_number(tensors):
    tensors[NAME][3, 5] = np.nan


def _infinite(tensors):
    tensors[NAME][0, 0] = -np.inf


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(NAME), f"missing tensor {NAME} [40, 24]"),
        (lambda t: t.update({"model.odd": np.ones((2, 3), np.float32)}), "unknown tensor model.odd [2, 3]"),
        (_narrow, f"tensor {NAME} has shape [40, 23], expected [40, 24]"),
        (lambda t: t.update({NAME: t[NAME].astype(np.int8)}), f"tensor {NAME} has dtype I8"),
        (lambda t: t.update({NAME: t[NAME].astype(ml_dtypes.float8_e4m3fn)}), f"tensor {NAME} has dtype F8_E4M3"),
        (_not_a_number, f"{NAME} (for blocks.3.mixer.up_proj.kernel) holds NaN or infinite values"),
        (_infinite, f"{NAME} (for blocks.3.mixer.up_proj.kernel) holds NaN or infinite values"),
        (lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}), "lm_head.weight differs from"),
    ],
    ids=["missing", "unknown", "shape", "int8", "float8", "nan", "inf", "tied"],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_named(tmp_path, edit, said):
    folder = write_kind(tmp_path / "hf", "dense", edit)
    message = refusal(folder)
    assert said in message
    assert "(1 problem)" in message
    with pytest.raises(UserError, match="1 problem"):
        load_hf(folder)


def test_all_mismatches_are_reported_at_once(tmp_path):
    def edit(tensors):
        _narrow(tensors)
        del tensors["model.norm.weight"]
        tensors["model.layers.0.linear_attn.A_log"] = np.zeros(6, np.uint8)
        for i in range(30):
            tensors[f"stray.{i}"] = np.ones(2, np.float32)

    folder = write_kind(tmp_path / "hf", "dense", edit)
    lines = refusal(folder).splitlines()
    assert "(33 problems)" in lines[0]
    assert len(lines) == 22
    assert lines[-1] == "  ... and 13 more"
    assert all(line.startswith("  ") for line in lines[1:])
    assert len(inspect(folder)["problems"]) == 33


def test_all_damaged_values_are_reported_at_once(tmp_path):
    def edit(tensors):
        for name in (NAME, "mtp.norm.weight", "model.layers.0.linear_attn.A_log"):
            tensors[name].flat[1] = np.nan

    message = refusal(write_kind(tmp_path / "hf", "dense", edit))
    assert "(3 problems)" in message


def test_a_promised_draft_head_that_is_absent_needs_no_mtp(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    folder = write_kind(tmp_path / "hf", "dense", edit)
    assert "--no-mtp" in refusal(folder)
    assert not convert(folder, tmp_path / "out", no_mtp=True).has_mtp


@pytest.mark.parametrize("keep", [0, 4, 8, 300, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    folder = write_kind(tmp_path / "hf", "llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "download it again" in message
    assert "\n" not in message


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    folder = write_kind(tmp_path, "llama")
    with TensorFolder(folder) as files:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
        last = max(files.tensors, key=lambda name: files.tensors[name].offset)
        with pytest.raises(UserError, match=f"ends inside tensor {last}"):
            files.read(last)


def test_a_missing_shard_is_named(tmp_path):
    folder = write_kind(tmp_path / "hf", "dense", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "missing 1 of 3 shards: model-00002-of-00003.safetensors" in refusal(folder)


def test_an_index_and_a_shard_that_disagree_are_named(tmp_path):
    folder = write_kind(tmp_path / "hf", "dense", shards=2)
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text())["weight_map"]
    name = next(iter(entries))
    index.write_text(json.dumps({"weight_map": {k: v for k, v in entries.items() if k != name}}))
    assert name in refusal(folder)
    index.write_text(json.dumps({"weight_map": {**entries, "ghost": entries[name]}}))
    assert "ghost" in refusal(folder)
    index.write_text(json.dumps({"weight_map": {**entries, name: "../elsewhere.safetensors"}}))
    assert "../elsewhere.safetensors" in refusal(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b"[" * 100000, None])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_unreadable_json_is_named(tmp_path, name, text):
    folder = write_kind(tmp_path / "hf", "dense", shards=2)
    if text is None:
        (folder / name).unlink()
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(text)
    message = refusal(folder)
    assert name in message
    assert "\n" not in message


def test_paths_that_are_no_model_folder_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/readme.txt").write_text("x")
    assert "is empty" in refusal(tmp_path / "empty")
    assert "is a file" in refusal(tmp_path / "file")
    assert "no such folder" in refusal(tmp_path / "absent")
    assert "holds no model.safetensors" in refusal(tmp_path / "other")


@pytest.mark.parametrize("dtype", ["float16", "int8", "nonsense"])
def test_other_dtypes_are_refused(tmp_path, dtype):
    assert dtype in refusal(write_kind(tmp_path / "hf", "llama"), dtype=dtype)


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    folder = write_kind(tmp_path / "hf", "llama")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="empty name"):
        convert(folder, "", force=True)
    with pytest.raises(UserError, match="the model's name is empty"):
        inspect("")


def test_the_source_is_never_replaced(tmp_path):
    folder = write_kind(tmp_path / "hf", "llama")
    for out in (folder, tmp_path):
        with pytest.raises(UserError, match="would replace the source"):
            convert(folder, out, force=True)
    load_hf(folder)


@pytest.fixture(scope="module")
def valid_file(tmp_path_factory):
    folder = write_kind(tmp_path_factory.mktemp("valid"), "llama")
    return (folder / "model.safetensors").read_bytes()


def loads_or_refuses(folder):
    """Any other error fails the test that calls this."""
    with contextlib.suppress(UserError), TensorFolder(folder) as files:
        for name in files.tensors:
            if files.tensors[name].dtype in DTYPES:
                files.read(name)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), length=st.integers(0, 2**64 - 1) | st.integers(0, 100))
@example(data=b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', length=55)
@example(data=b'{"a":{"dtype":"F32","shape":[9999999999,9999999999],"data_offsets":[0,4]}}', length=74)
@example(data=b'{"a":5}', length=7)
def test_any_header_is_read_or_refused(tmp_path, data, length):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + data)
    loads_or_refuses(tmp_path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_header_byte_is_read_or_refused(tmp_path, valid_file, data):
    header_end = 8 + struct.unpack("<Q", valid_file[:8])[0]
    damaged = bytearray(valid_file)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.safetensors").write_bytes(bytes(damaged))
    loads_or_refuses(tmp_path)


OPTIONAL_FIELDS = (
    *("rope_scaling", "rope_theta", "layer_types", "mlp_only_layers", "decoder_sparse_step", "hidden_act"),
    *("use_sliding_window", "max_window_layers", "sliding_window", "norm_topk_prob", "quantization_config"),
    *("num_nextn_predict_layers", "logit_scale", "final_logit_softcapping", "text_config", "model_type"),
)
_SMALL_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats(-10, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=100)
@given(
    kind=st.sampled_from(["moe", "qwen2", "llama"]),
    field=st.sampled_from(sorted({*CONFIGS["moe"]["text_config"], *CONFIGS["llama"], *OPTIONAL_FIELDS})),
    value=_SMALL_JSON,
)
def test_any_value_of_a_config_field_is_understood_or_refused(kind, field, value):
    config = config_of(kind)
    config.get("text_config", config)[field] = value
    with contextlib.suppress(UserError):
        find_family(config).parse_config(config)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")
    convert(write_kind(root / "hf", "qwen2"), root / "out")
    return root / "out"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "model.json").unlink(), "model.json"),
        (lambda f: (f / "model.json").write_text("{}"), "model.json"),
        (lambda f: (f / "params/index.json").write_text("{"), "index.json"),
        (lambda f: (f / "params/index.json").write_text('{"format": 99, "parameters": {}}'), "format 99"),
        (lambda f: (f / "params/index.json").write_text('{"format": 1, "parameters": {}}'), "is not in the checkpoint"),
        (lambda f: [x.unlink() for x in (f / "params/00000").rglob("*") if x.is_file()], "00000"),
        (lambda f: [x.write_bytes(b"x") for x in (f / "params/00000").rglob("d/*")], "00000"),
        (lambda f: [x.write_text("{") for x in (f / "params/00000").rglob("_METADATA")], "00000"),
    ],
)  # fmt: skip
def test_a_damaged_converted_folder_is_named(tmp_path, converted, damage, said):
    folder = tmp_path / "copy"
    shutil.copytree(converted, folder)
    damage(folder)
    with pytest.raises(UserError) as error:
        load_checkpoint(folder)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_parameter_of_another_shape_in_a_converted_folder_is_named(tmp_path, converted):
    folder = tmp_path / "copy"
    shutil.copytree(converted, folder)
    model = json.loads((folder / "model.json").read_text())
    model["vocab_size"] = 62
    (folder / "model.json").write_text(json.dumps(model))
    with pytest.raises(UserError, match=r"embedding is \(61, 24\), not \(62, 24\)"):
        load_checkpoint(folder, dtype=jnp.float32)
