"""The command's frame: help, exit codes, what a failure prints, and what goes to which stream."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from wmtp_jax.cli import main as frame
from wmtp_jax.cli.output import jsonable, print_json, printable
from wmtp_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("wmtp_jax", "pallas_kernels", "checkpoints_convert")
FRAME_WITH_A_COMMAND = """
import time, typer
from wmtp_jax.cli import main as frame
app = typer.Typer()
app.callback()(frame._global_options)
@app.command()
def act():
    {action}
frame.build_app = lambda: app
frame.main()
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_failing(monkeypatch: pytest.MonkeyPatch, action: Any) -> int:
    app = typer.Typer()
    app.callback()(frame._global_options)
    app.command(name="act")(action)
    monkeypatch.setattr(frame, "build_app", lambda: app)
    return frame.run(["act"])


def raising(error: BaseException) -> Any:
    def action() -> None:
        raise error

    return action


def open_missing_file() -> None:
    Path("/no/such\x1b[31m/model.safetensors").read_bytes()


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_help_loads_neither_jax_nor_a_tokenizer() -> None:
    heavy = ["jax", "flax", "orbax", "optax", "numpy", "tokenizers", "huggingface_hub", "torch", "transformers"]
    process = start(
        "import sys; from wmtp_jax.cli.main import run; code = run(sys.argv[1:]); print('loaded:', *sys.modules);"
        "sys.exit(code)",
        "--help",
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("Usage: wmtp")
    assert not set(heavy) & set(out.splitlines()[-1].split())


def test_the_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run([]) == 0
    assert capsys.readouterr().out.startswith("Usage: wmtp")


@pytest.mark.parametrize("name", frame.COMMAND_MODULES)
def test_every_command_is_listed_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--help"]) == 0
    assert f"\n  {name} " in capsys.readouterr().out
    assert frame.run([name, "--help"]) == 0
    assert f"Usage: wmtp {name} " in capsys.readouterr().out


def test_version_names_the_libraries_that_decide_a_bug_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("wmtp 0.")
    assert "jax 0." in out
    assert "Python 3." in out


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["act", "--nonsense"], ["act", "surplus"]])
def test_a_mistyped_command_gives_one_line_and_exit_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_failing(monkeypatch, lambda: None)
    assert frame.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("wmtp: ")
    assert "--help" in err


@pytest.mark.parametrize(
    ("action", "code", "printed"),
    [
        (raising(UserError("model.safetensors: truncated")), 2, "wmtp: model.safetensors: truncated\n"),
        (raising(UserError("2 tensors do not fit\n  a\n  b")), 2, "wmtp: 2 tensors do not fit\n  a\n  b\n"),
        (raising(UserError("bad name \x1b[2Ja\tb")), 2, "wmtp: bad name \\x1b[2Ja\\tb\n"),
        (open_missing_file, 2, "wmtp: /no/such\\x1b[31m/model.safetensors: No such file or directory\n"),
        (fill_the_disk, 2, "wmtp: No space left on device\n"),
        (raising(KeyboardInterrupt()), 130, "wmtp: interrupted\n"),
        (raising(typer.Exit(3)), 3, ""),
        (
            raising(RuntimeError("boom\nat length")),
            1,
            "wmtp: internal error: RuntimeError: boom (set WMTP_TRACEBACK=1 for the traceback)\n",
        ),
        (
            raising(AssertionError()),
            1,
            "wmtp: internal error: AssertionError (set WMTP_TRACEBACK=1 for the traceback)\n",
        ),
    ],
)
def test_each_failure_has_its_line_and_its_exit_code(
    action: Any, code: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(frame.TRACEBACK_VARIABLE, raising=False)
    assert run_failing(monkeypatch, action) == code
    assert capsys.readouterr() == ("", printed)


def test_a_bug_shows_its_traceback_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(frame.TRACEBACK_VARIABLE, "1")
    assert run_failing(monkeypatch, raising(RuntimeError("boom"))) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("RuntimeError: boom\n")


@pytest.mark.parametrize(
    "action", ["[print('x' * 999) for _ in range(9999)]", "[print(i, flush=True) for i in range(9999)]"]
)
def test_a_reader_that_leaves_early_is_no_error(action: str) -> None:
    process = start(FRAME_WITH_A_COMMAND.format(action=action), "act")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise on Windows")
def test_an_interrupt_ends_in_one_line_with_130() -> None:
    process = start(FRAME_WITH_A_COMMAND.format(action="print('ready', flush=True); time.sleep(60)"), "act")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "wmtp: interrupted\n")
    assert process.returncode == 130


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise on Windows")
def test_so_does_one_within_an_import_that_would_swallow_it(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import contextlib, signal\nwith contextlib.suppress(BaseException):\n    signal.raise_signal(signal.SIGINT)"
    )
    process = start(
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"sys.path.insert(0, {str(tmp_path)!r}); from wmtp_jax.__main__ import main; main()"
    )
    assert process.communicate(timeout=30) == ("", "wmtp: interrupted\n")
    assert process.returncode == 130


def test_text_survives_a_terminal_without_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = start(FRAME_WITH_A_COMMAND.format(action="print('na\\u00efve')"), "act")
    assert process.communicate(timeout=60) == ("na?ve\n", "")
    assert process.returncode == 0


@dataclass(frozen=True)
class Report:
    path: Path
    step_ms: Any
    tokens: Any


def test_a_report_becomes_one_line_of_strict_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(Report(Path("a/b"), np.float32(2.5), np.arange(6).reshape(2, 3)))
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")
    assert json.loads(out) == {"path": "a/b", "step_ms": 2.5, "tokens": [[0, 1, 2], [3, 4, 5]]}


def test_what_has_no_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        jsonable({"a": [object()]})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=12,
)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(json_values)
def test_strict_json_reads_back_with_null_for_what_it_lacks(value: Any) -> None:
    assert json.loads(json.dumps(jsonable(value), allow_nan=False)) == finite(value)


@given(st.text(st.characters(), max_size=40))
def test_no_printed_line_can_steer_a_terminal(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert shown.count("\n") == text.count("\n")
    if all(c.isprintable() for c in text):
        assert shown == text


def test_the_wheel_holds_every_file_of_every_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    presets = {f"wmtp_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.toml")}
    assert files
    assert presets
    files |= presets
    assert {name for name in packed if ".dist-info/" not in name} == files
