"""`wmtp convert` and `wmtp inspect` as a person runs them."""

import json

import pytest

from tests.checkpoints_convert.folders import write_kind
from wmtp_jax.cli.main import run


def test_convert_reports_on_standard_output_and_warns_on_standard_error(tmp_path, capsys):
    source = write_kind(tmp_path / "hf", "moe")
    assert run(["convert", str(source), str(tmp_path / "out"), "--no-mtp"]) == 0
    printed = capsys.readouterr()
    assert "Qwen3.5 without a draft head" in printed.out
    assert "skipped 19 tensors: draft head, left out by --no-mtp" in printed.out
    assert printed.err == f"warning: {source} holds no tokenizer: the model takes token ids only\n"


def test_convert_prints_one_json_object(tmp_path, capsys):
    source = write_kind(tmp_path / "hf", "moe")
    assert run(["convert", str(source), str(tmp_path / "out"), "--dtype", "float32", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dtype"] == "float32"
    assert report["parameter_bytes"] == 4 * report["parameters"]
    assert report["has_mtp"] is True


def test_inspect_shows_layers_sizes_and_problems(tmp_path, capsys):
    source = write_kind(tmp_path / "hf", "dense", lambda tensors: tensors.pop("model.norm.weight"))
    assert run(["inspect", str(source)]) == 0
    shown = capsys.readouterr().out
    assert "4: 1 attention, 3 delta, 4 dense" in shown
    assert "128 B target, 128 B draft (50.0% of both)" in shown
    assert "problem: missing tensor model.norm.weight [24]" in shown


def test_inspect_prints_one_json_object(tmp_path, capsys):
    assert run(["inspect", str(write_kind(tmp_path / "hf", "llama")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == {"total": 3, "attention": 3, "dense": 3}


@pytest.mark.parametrize("command", [["convert", "{}/absent", "{}/out"], ["inspect", "{}/absent"]])
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, command):
    assert run([word.format(tmp_path) for word in command]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"wmtp: {tmp_path}/absent: no such folder\n"
