"""The commands: what they print as JSON and as tables, and the line that a bad flag gets."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.folders import write_text
from wmtp_jax.bench.prompts import hugging_face_folder
from wmtp_jax.cli.main import run
from wmtp_jax.errors import UserError

ACCEPT = "--windows native,5 --sinks 2 --contexts 12 --new-tokens 9 --prompts 2 --rows 2 --temperature 0.9"


@pytest.fixture
def text(tmp_path: Path) -> str:
    return str(write_text(tmp_path / "text.txt", 60))


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def test_accept_prints_one_json_object(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "accept", "--model", str(folder), "--text", text, *ACCEPT.split(), "--json"]) == 0
    out = printed_json(capsys)
    assert out["trained_context"] == 32768
    (context,) = out["contexts"]
    assert (context["context"], context["prompts"], context["same_text"]) == (12, 2, True)
    native, windowed = context["drafters"]
    assert (native["window"], windowed["window"]) == (0, 5)
    assert len(native["acceptance"]) == 3
    assert set(windowed["length_minus_native"]) == {"value", "error"}
    assert native["acceptance_length"]["value"] == pytest.approx(
        sum(n * count for n, count in enumerate(native["histogram"])) / sum(native["histogram"]) + 1
    )


def test_accept_prints_a_table_with_a_line_a_drafter(
    folder: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*ACCEPT.split(), "--trained-context", "11"]
    assert run(["bench", "accept", "--model", str(folder), "--text", text, *arguments]) == 0
    out, err = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[:4] for row in rows] == [["continuation", "12*", "native", ""], ["", "", "5", "2"]]
    assert [row[-1] for row in rows] == ["yes", "yes"]
    assert "* beyond the 11 tokens" in out
    assert "4-token runs that repeat earlier new text: " in out
    assert err.splitlines()[0] == "continuation, context 12: decoding in 3 ways"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="transformers comes with the tests on Python 3.11 alone")
def test_versus_hf_prints_one_json_object(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the other contender is Hugging Face transformers")
    flags = "--prompt-tokens 14 --new-tokens 8 --window 5 --sink 2 --repeats 1 --threads 1 --json"
    assert run(["bench", "versus-hf", "--model", str(folder), "--prompt-file", text, *flags.split()]) == 0
    out = printed_json(capsys)
    assert (out["prompt_tokens"], out["new_tokens"], out["threads"]) == (14, 8, 1)
    assert list(out["contenders"]) == ["transformers, 1 thread", "wmtp gamma 0", "wmtp gamma 3"]
    for contender in out["contenders"].values():
        assert contender["same_text"] is True
        assert len(contender["rounds"]["seconds"]) == 1


@pytest.mark.slow
def test_start_runs_the_command_cold_and_warm(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--text", text, "--contexts", "20", "--new-tokens", "5", "--repeats", "1"]
    assert run(["bench", "start", "--model", str(folder), *arguments, "--json"]) == 0
    (start,) = printed_json(capsys)["starts"]
    assert start["context"] == 20
    for one in (start["cold"], *start["warm"]):
        assert 0 < one["first_text_seconds"] < one["end_seconds"]
        assert one["peak_bytes"] > start["weights_bytes"] + start["caches_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("accept --windows native,many", "--windows: 'many' is not a whole number; give native or numbers"),
        ("accept --windows 128,128", "--windows: 128,128 holds a value twice"),
        ("accept --windows 0,native", "--windows: 0 and native both mean no window; give one of them, once"),
        ("accept --windows ''", "--windows: '' is not a whole number; give native or numbers"),
        ("accept --model ''", "the model's name is empty: give a folder or a hub id"),
        ("memory --dtype ''", "--dtype '': must be one of float32, bfloat16"),
        ("accept --contexts 512,", "--contexts : must be a number of tokens such as 4096, 64K or 1M"),
        ("accept --contexts 0", "--contexts 0: must be 1 token or more"),
        ("accept --contexts 99999999999999", "--contexts 99999999999999: must be a number of tokens"),
        ("accept --gamma 0", "--gamma 0: must be 1 or more, at most 8"),
        ("accept --gamma 9", "--gamma 9: must be 1 or more, at most 8"),
        ("accept --sinks 4,-1", "--sinks: '-1' is not a whole number; give numbers with commas between"),
        ("accept --sinks 0,0", "--sinks: 0,0 holds a value twice"),
        ("accept --contexts K", "--contexts K: must be a number of tokens"),
        ("accept --contexts 4K,4096", "--contexts: 4096,4096 holds a value twice"),
        ("accept --tasks needles,riddles", "--tasks: there is no task 'riddles'; the tasks are needles, frequent,"),
        ("accept --tasks common,common", "--tasks: common,common holds a value twice"),
        ("accept --seed -1", "--seed -1: must be 0 or more"),
        ("accept --plot picture.jpg", "--plot picture.jpg: must end in .png"),
        ("accept --plot /no/such/folder/a.png", "there is no folder /no/such/folder"),
        ("accept --new-tokens 1", "--new-tokens 1: must be 2 or more"),
        ("accept --model /no/such/folder", "/no/such/folder: no such folder"),
        ("versus-hf --repeats 0", "--repeats 0: must be 1 or more"),
        ("versus-hf --prompt-tokens 0", "--prompt-tokens 0: must be 1 or more"),
        ("start --contexts x", "--contexts x: must be a number of tokens"),
        ("start --model /no/such/folder", "/no/such/folder: no such folder"),
        ("nonsense", "No such command 'nonsense'"),
    ],
)
def test_a_bad_flag_gets_one_line_that_names_it(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *shlex.split(arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wmtp: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="transformers comes with the tests on Python 3.11 alone")
def test_more_threads_than_processors_are_refused(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "versus-hf", "--model", str(folder), "--prompt-file", text, "--threads", "9999"]) == 2
    assert "--threads 9999: this process may use only" in capsys.readouterr().err


def test_without_transformers_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(["bench", "versus-hf", "--model", str(folder)]) == 2
    assert "this needs the extra `test`" in capsys.readouterr().err


def test_a_converted_folder_is_not_for_transformers(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(UserError, match="a converted folder, which transformers cannot read"):
        hugging_face_folder(str(tmp_path))
