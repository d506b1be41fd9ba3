import json

import pytest

from checkpoints_convert.convert import convert
from checkpoints_convert.summary import inspect
from checkpoints_convert.synthetic import qwen3_5_config, stored_shapes, write_synthetic
from tests.checkpoints_convert.folders import CONFIGS, config_of, write_kind
from tests.checkpoints_convert.test_families import NESTED, PUBLISHED_35B


def write_hollow(folder, config, shapes):
    """Headers as published, with holes instead of values: no disk is used, and reading weights would be noticed."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(config))


def test_the_published_35b_has_its_published_sizes(tmp_path):
    """35B-A3B: 34.66 billion parameters and a head of 0.845; 20 + 2 KiB a token; 61.4 MiB of state a sequence."""
    write_hollow(tmp_path, PUBLISHED_35B, stored_shapes(PUBLISHED_35B, NESTED))
    summary = inspect(tmp_path)
    assert summary["problems"] == []
    assert summary["family"] == "Qwen3.5"
    assert summary["layers"] == {"total": 40, "attention": 10, "delta": 30, "moe": 40}
    sizes = summary["parameters"]
    assert sizes["draft_head"] == pytest.approx(0.845e9, rel=1e-3)
    assert sizes["total"] - sizes["draft_head"] == pytest.approx(34.66e9, rel=1e-4)
    assert sizes["embeddings"] == 2 * 248320 * 2048
    assert summary["parameter_bytes"]["total"] == pytest.approx(2 * sizes["total"], rel=1e-6)
    assert summary["cache_bytes_per_token"] == {"target": 20480, "draft": 2048, "draft_share": pytest.approx(1 / 11)}
    assert summary["recurrent_state_bytes_per_row"] == pytest.approx(61.4 * 2**20, rel=1e-3)


@pytest.mark.parametrize("kind", ["moe", "llama"])
def test_both_formats_tell_the_same(tmp_path, kind):
    convert(write_kind(tmp_path / "hf", kind), tmp_path / "out")
    before, after = inspect(tmp_path / "hf"), inspect(tmp_path / "out")
    assert (before.pop("format"), after.pop("format")) == ("huggingface", "converted")
    for summary in (before, after):
        del summary["path"], summary["family"], summary["stored_values"]
    assert before == after
    assert before["has_mtp"] is (kind == "moe")


def test_skips_and_problems_are_listed(tmp_path):
    def edit(tensors):
        tensors["model.visual.x"] = tensors.pop("model.norm.weight")

    summary = inspect(write_kind(tmp_path, "dense", edit))
    assert list(summary["skipped"]) == ["model.visual.x"]
    assert summary["problems"] == ["missing tensor model.norm.weight [24]"]


def test_a_synthetic_folder_has_the_size_asked_for_and_converts(tmp_path):
    assert sum_of_bytes(qwen3_5_config(8)) >= 8e9
    assert qwen3_5_config(80)["text_config"]["num_hidden_layers"] > 300
    write_synthetic(tmp_path / "hf", config_of("dense"))
    convert(tmp_path / "hf", tmp_path / "out")
    assert inspect(tmp_path / "out")["parameters"]["total"] * 2 == sum_of_bytes(CONFIGS["dense"])


def sum_of_bytes(config):
    total = 0
    for shape in stored_shapes(config).values():
        size = 2
        for length in shape:
            size *= length
        total += size
    return total
