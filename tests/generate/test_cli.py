"""`wmtp generate`: what goes to which stream, and what a terminal never gets."""

import io
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wmtp_jax as wmtp
from tests.generate.tiny import MAX_POSITIONS
from wmtp_jax.cli.main import run
from wmtp_jax.cli.terminal import safe_for_terminal

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--max-new-tokens", "40", "--ignore-eos", "--dtype", "float32"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def expected(model: wmtp.Model) -> wmtp.Generation:
    """What the same options give in Python."""
    return wmtp.generate(model, "fox", max_new_tokens=40, ignore_eos=True)


def generate(folder: Path, *arguments: str) -> int:
    return run(["generate", "--model", str(folder), *SHORT, *arguments])


def test_text_goes_to_output_and_one_closing_line_to_errors(
    folder: Path, expected: wmtp.Generation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "fox") == 0
    out, err = capsys.readouterr()
    assert out == expected.text[0] + "\n"
    assert err.count("\n") == 1
    head, rate, length, step = err.strip().split(", ")
    assert (head, length) == ("40 tokens", f"acceptance length {expected.stats.acceptance_length:.2f}")
    assert rate.endswith(" tokens/s")
    assert step.startswith("step ")
    assert step.endswith(" ms")


def test_one_token_has_no_step_to_speak_of(
    folder: Path, expected: wmtp.Generation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "fox", "--max-new-tokens", "1") == 0
    assert capsys.readouterr().err == "1 token\n"
    assert generate(folder, "fox", "--max-new-tokens", "0") == 0
    assert capsys.readouterr() == ("\n", "0 tokens\n")


def test_json_is_one_object_with_every_figure(
    folder: Path, expected: wmtp.Generation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "fox", "--json") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["text"], found["tokens"]) == (expected.text[0], expected.tokens[0])
    assert found["finished"] == "length"
    assert found["stats"].keys() == vars(expected.stats).keys()
    assert found["stats"]["accepted_histogram"] == expected.stats.accepted_histogram


def test_a_file_a_pipe_and_a_chat_are_prompts_too(
    folder: Path,
    model: wmtp.Model,
    expected: wmtp.Generation,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"fox")
    assert generate(folder, "--prompt-file", str(tmp_path / "prompt.txt")) == 0
    assert capsys.readouterr().out == expected.text[0] + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"fox")))
    assert generate(folder, "--prompt-file", "-") == 0
    assert capsys.readouterr().out == expected.text[0] + "\n"
    assert generate(folder, "fox", "--chat", "--json") == 0
    ids = model.encode_chat([{"role": "user", "content": "fox"}])
    found = json.loads(capsys.readouterr().out)
    assert found["stats"]["prompt_tokens"] == len(ids)
    assert found["tokens"] != expected.tokens[0]


def test_a_stop_string_ends_the_text(
    folder: Path, expected: wmtp.Generation, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = next(c for c in expected.text[0][5:] if c.isascii() and c.isalpha())
    assert generate(folder, "fox", "--stop", "absent", "--stop", stop) == 0
    assert capsys.readouterr().out == expected.text[0].split(stop)[0] + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a prompt, or --prompt-file"),
        (["a", "--prompt-file", "b"], "give a prompt or --prompt-file, not both"),
        ([""], "the prompt is empty"),
        (["--prompt-file", "{tmp}/latin"], "{tmp}/latin: not UTF-8 at byte 3 (0xe9)"),
        (["--prompt-file", "{tmp}/empty"], "{tmp}/empty is empty"),
        (["--prompt-file", "{tmp}/none"], "{tmp}/none: No such file or directory"),
        (["--prompt-file", "{tmp}"], "{tmp}: Is a directory"),
        (["caf\udce9"], "not valid Unicode at character 3"),
        (["a", "--gamma", "9"], "gamma=9"),
        (["a", "--sink", "3", "--window", "0"], "sink=3 needs a window"),
        (["a", "--temperature", "-1"], "temperature=-1.0"),
        (["a", "--dtype", "int8"], "dtype=int8"),
        (["a", "--dtype", ""], "dtype='': must be one of float32, bfloat16"),
        (["a", "--cache-dtype", ""], "cache_dtype='': must be one of float32, bfloat16"),
        (["a", "--kernels", ""], "kernels '' do not exist: take one of reference, xla"),
        (["a", "--model", ""], "the model's name is empty: give a folder or a hub id"),
        (["a", "--model", "{tmp}/none"], "{tmp}/none: no such folder"),
        (["a", "--max-new-tokens", "512"], f"max_positions={MAX_POSITIONS}"),
        (["a", "--compare", "--gamma", "0"], "a comparison drafts"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "empty").write_bytes(b"")
    assert generate(folder, *(argument.format(tmp=tmp_path) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message.format(tmp=tmp_path) in err


def test_output_cannot_steer_a_terminal(
    folder: Path, expected: wmtp.Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in expected.text[0])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert generate(folder, "fox") == 0
    assert terminal.getvalue() == safe_for_terminal(expected.text[0]) + "\n"


@given(st.text(max_size=30))
def test_only_control_characters_are_escaped(text: str) -> None:
    shown = safe_for_terminal(text)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in shown)
    if not any(unicodedata.category(c) == "Cc" for c in text):
        assert shown == text


def test_an_escape_sequence_is_shown_as_what_it_is() -> None:
    assert safe_for_terminal("a\x1b[2J\tb\r\n\x9bm 👩\u200d🚀\u00a0") == "a\\x1b[2J\tb\\r\n\\x9bm 👩\u200d🚀\u00a0"


def comparison(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, Any]:
    assert generate(folder, "fox", "--compare", *arguments) == 0
    shown = capsys.readouterr().out
    assert generate(folder, "fox", "--compare", "--json", *arguments) == 0
    return shown, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_comparison_shows_the_text_once_and_three_ways(
    folder: Path, expected: wmtp.Generation, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, found = comparison(folder, capsys)
    assert shown.startswith(expected.text[0] + "\n\n")
    rows = [line for line in shown.splitlines() if line.endswith(" yes │")]
    assert [row.split()[1] for row in rows] == ["plain", "native", "windowed"]
    assert f"window {found['window']}, sink 4" in shown
    assert found["tokens"] == expected.tokens[0]
    runs = found["runs"]
    assert [run["same_text"] for run in runs.values()] == [True] * 3
    draft_bytes = [run["stats"]["draft_cache_bytes"] for run in runs.values()]
    assert draft_bytes[0] == 0 < draft_bytes[2] < draft_bytes[1]
    assert not found["window_covers_everything"]
    assert all(run["stats"]["compile_seconds"] < 0.5 for run in runs.values())


def test_the_command_reads_a_pipe_and_writes_a_pipe(folder: Path, expected: wmtp.Generation) -> None:
    def command(prompt: bytes) -> subprocess.CompletedProcess[bytes]:
        code = "from wmtp_jax.cli.main import main; main()"
        arguments = ["generate", "--prompt-file", "-", "--model", str(folder), *SHORT]
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            input=prompt,
            capture_output=True,
            check=False,
        )

    done = command(b"fox")
    assert (done.returncode, done.stdout.decode()) == (0, expected.text[0] + "\n")
    assert done.stderr.startswith(b"40 tokens, ")
    refused = command(b"\xff")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert refused.stderr == b"wmtp: standard input: not UTF-8 at byte 0 (0xff)\n"
