"""Every kind of damage to a GGUF file: one clear UserError that names it, and nothing written."""

import contextlib

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints_convert.gguf_file import GgufFile
from checkpoints_convert.summary import inspect
from tests.checkpoints_convert.gguf_files import F32, Q8_0, VOCAB, mixed, write_small
from tests.checkpoints_convert.test_errors import refusal
from wmtp_jax.errors import UserError


def _replace(name, change):
    return lambda stored: stored.update({name: change(stored[name])})


def _set(name, value):
    def edit(stored):
        stored[name].flat[3] = value

    return edit


UP = "blk.1.ffn_up.weight"
HF_UP = "model.layers.1.mlp.up_proj.weight"
SCALED = "rope__scaling__type"


@pytest.mark.parametrize(
    ("edit", "changes", "said"),
    [
        (lambda t: t.pop(UP), {}, f"missing tensor {HF_UP} [160, 96]"),
        (lambda t: t.update({"blk.1.ffn_odd.weight": t[UP]}), {}, "unknown tensor blk.1.ffn_odd.weight [160, 96]"),
        (lambda t: t.update({"blk.3.ffn_up.weight": t[UP]}), {}, "unknown tensor model.layers.3.mlp.up_proj.weight"),
        (lambda t: t.update({HF_UP: t[UP]}), {}, "under names of GGUF and of Hugging Face"),
        (_replace(UP, lambda x: x[:, :-32].copy()), {}, f"tensor {HF_UP} has shape [160, 64], expected [160, 96]"),
        (_replace(UP, lambda x: x.astype(np.int32)), {}, f"tensor {HF_UP} has dtype I32, which the gguf library does"),
        (_replace(UP, lambda x: x.astype(np.float64)), {}, f"tensor {HF_UP} has dtype F64"),
        (_set(UP, np.nan), {}, f"{HF_UP} (for blocks.3.mixer.up_proj.kernel) holds NaN or infinite values"),
        (_set(UP, np.inf), {}, f"{HF_UP} (for blocks.3.mixer.up_proj.kernel) holds NaN or infinite values"),
        (lambda t: t.pop("output_norm.weight"), {}, "missing tensor model.norm.weight [96]"),
        (lambda t: t.update({"rope_freqs.weight": np.full(10, 3, np.float32)}), {}, "not those of Llama 3.1"),
        (_replace("output_norm.weight", lambda x: x[:-1].copy()), {}, "tensor model.norm.weight has shape [95]"),
        (None, {"block_count": None}, "metadata llama.block_count is missing"),
        (None, {"embedding_length": None}, "metadata llama.embedding_length is missing"),
        (None, {"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        (None, {"vocab_size": None}, "metadata llama.vocab_size is missing"),
        (None, {"block_count": 4}, "missing tensor model.layers.3.input_layernorm.weight [96]"),
        (None, {"block_count": 2**32 - 1}, "llama.block_count=4294967295, but it holds 30 tensors only"),
        (None, {"block_count": "three"}, "metadata llama.block_count='three' must be one positive whole number"),
        (None, {"attention__head_count": [6, 5, 6]}, "llama.attention.head_count=[6, 5, 6] must be one positive"),
        (None, {"attention__head_count_kv": 4}, "num_key_value_heads=4 does not divide num_attention_heads=6"),
        (None, {"attention__key_length": 21}, "llama.attention.value_length=20 is not supported"),
        (None, {"rope__dimension_count": 10}, "llama.rope.dimension_count=10 is not supported"),
        (None, {"expert_count": 8}, "llama.expert_count=8 is not supported"),
        (None, {"logit_scale": 2.0}, "llama.logit_scale=2.0 is not supported"),
        (None, {"attention__sliding_window": 64}, "sliding_window=64 is not supported"),
        (None, {SCALED: "longrope", "rope__scaling__factor": 2.0}, "rope.scaling.type 'longrope' by 2.0"),
        (None, {SCALED: "yarn"}, "rope.scaling.type 'yarn' by 0.0"),
        (None, {"metadata": {"split.count": 3, "split.no": 1}}, "is one of 3 parts; merge all of them"),
        (None, {"metadata": {"tokenizer.ggml.eos_token_id": "</s>"}}, "tokenizer.ggml.eos_token_id='</s>' must be a"),
        (None, {"architecture": "gemma"}, "general.architecture 'gemma' is not supported; supported: llama, qwen2"),
        (None, {"architecture": "qwen3moe"}, "general.architecture 'qwen3moe' is not supported"),
        (None, {"endianess": gguf.GGUFEndian.BIG}, "is big-endian"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_named_with_what_is_wrong(tmp_path, edit, changes, said):
    path = write_small(tmp_path / "x.gguf", **{"edit": edit, **changes})
    message = refusal(path)
    assert said in message
    lines = message.splitlines()
    assert lines[0].startswith(f"{path}: ")
    assert len(lines) == 1 or "the tensors do not fit the config" in lines[0] or "damaged weights" in lines[0]


def test_rows_that_are_no_whole_blocks_are_named(tmp_path):
    path = write_small(tmp_path / "x.gguf", type_of=lambda name, values: Q8_0 if name == UP else F32)
    whole = path.read_bytes()
    sizes = (96).to_bytes(8, "little") + (160).to_bytes(8, "little")
    at = whole.index(sizes, whole.index(UP.encode()))
    path.write_bytes(whole[:at] + (80).to_bytes(8, "little") + whole[at + 8 :])
    assert f"tensor {HF_UP} has dtype Q8_0 and rows of 80 values, not a multiple of 32" in refusal(path)


def test_a_type_that_the_library_does_not_know_is_named(tmp_path):
    path = write_small(tmp_path / "x.gguf")
    whole = path.read_bytes()
    at = whole.index(UP.encode()) + len(UP) + 4 + 16
    path.write_bytes(whole[:at] + (999).to_bytes(4, "little") + whole[at + 4 :])
    assert f"tensor {HF_UP} has dtype type 999, which the installed gguf library does not know" in refusal(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a GGUF file"),
        (b"GGU", "is not a GGUF file"),
        (b"PK\x03\x04 not one", "is not a GGUF file"),
        (b"GGUF", "ends inside its header at byte 4"),
        (b"GGUF\x01\0\0\0" + bytes(16), "is GGUF version 1, and only 2 and 3 are read"),
        (b"GGUF\x03\0\0\0" + bytes(16), "metadata general.architecture is missing"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "ends inside its header"),
    ],
)
def test_a_file_that_is_no_gguf_is_named(tmp_path, content, said):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert "\n" not in message


def test_an_absent_file_is_named(tmp_path):
    assert refusal(tmp_path / "x.gguf") == f"{tmp_path}/x.gguf: no such file"
    with pytest.raises(UserError, match=r"x/y\.gguf: no such file"):
        inspect("x/y.gguf")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)]}
    path = write_small(tmp_path_factory.mktemp("small") / "x.gguf", type_of=mixed(Q8_0), metadata=tokens)
    return path.read_bytes()


def reads_or_refuses(path):
    """Whether it reads; any error but a UserError of one line that names the file fails the test that calls this."""
    refused = None
    try:
        with GgufFile(path) as files:
            for name, info in files.tensors.items():
                if name not in files.quantized or not files.quantized[name].faults:
                    files.read(name, 0, min(2, info.shape[0]) if info.shape else None)
    except UserError as error:
        refused = str(error)
    assert refused is None or (refused.startswith(f"{path}: ") and "\n" not in refused)
    return refused is None


def test_a_file_cut_anywhere_is_refused_in_one_line(tmp_path, small_file):
    path = tmp_path / "x.gguf"
    header = small_file.index(b"blk.2.ffn_down.weight") + 100
    cuts = [*range(0, header, 61), *range(header, len(small_file), 9973), len(small_file) - 1]
    for cut in cuts:
        path.write_bytes(small_file[:cut])
        assert not reads_or_refuses(path), cut
    path.write_bytes(small_file)
    assert reads_or_refuses(path)
    path.write_bytes(small_file[:-40])
    assert "ends at byte" in refusal(path)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path, small_file):
    path = tmp_path / "x.gguf"
    path.write_bytes(small_file)
    with GgufFile(path) as files:
        path.write_bytes(small_file[:-10])
        last = max(files.tensors, key=lambda name: files.tensors[name].offset)
        with pytest.raises(UserError, match=f"ends inside tensor {last}"):
            files.read(last)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_header_byte_is_read_or_refused(tmp_path, small_file, data):
    header = small_file.index(b"blk.2.ffn_down.weight") + 100
    damaged = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.gguf"
    path.write_bytes(bytes(damaged))
    if reads_or_refuses(path):
        with contextlib.suppress(UserError):
            inspect(path)
