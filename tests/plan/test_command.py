"""`wmtp plan`: what it prints, and the one line that a bad flag gets."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import CONFIGS
from wmtp_jax.cli.main import run
from wmtp_jax.config import config_to_json
from wmtp_jax.errors import UserError
from wmtp_jax.folders import DEMO_FOLDER
from wmtp_jax.plan.sizes import sizes_of_config
from wmtp_jax.plan.source import read_sizes
from wmtp_jax.units import parse_tokens, show_bytes, show_tokens

ROOT = Path(__file__).resolve().parents[2]


def planned(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments.split(), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_json_holds_sizes_rows_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, "--model qwen3_6_35b --hardware h200 --context 256K --gamma 6 --rows 2")
    assert out["options"]["context"] == 2**18
    assert (out["options"]["weights"], out["options"]["cache"]) == ("bf16", "bf16")
    assert out["parameters"]["total"] == out["parameters"]["target"] + out["parameters"]["draft"]
    assert out["cache_bytes_per_token"] == {"target": 20480, "draft": 2048, "draft_share": 1 / 11}
    row = out["row_bytes"]
    assert row["pages"] == 20480 * 2**18
    assert (row["draft_native"], row["draft_ring"]) == (2048 * 2**18, 2048 * (4032 + 64 + 5))
    assert row["native"] - row["windowed"] == row["draft_native"] - row["draft_ring"]
    usable = 141e9 * 0.85 - out["weight_bytes"]["total"]
    assert out["rows_that_fit"] == {"native": usable // row["native"], "windowed": usable // row["windowed"]}
    for costs in (out["steps"]["roofline"], out["steps"]["calibrated"]):
        native, windowed = costs["native"], costs["windowed"]
        assert costs["gain"] == pytest.approx(native["step_ms"] / windowed["step_ms"])
        assert native["verify_ms"] == windowed["verify_ms"] > costs["plain"]["step_ms"]
    assert (out["published"], out["warnings"]) == ([], [])


def test_published_figures_come_whenever_the_setting_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    figures = [
        planned(capsys, f"--model nemotron_3_super --hardware b200 --context {context} --weights {weights}")
        for context, weights in (("1M", "nvfp4"), ("64K", "bf16"))
    ]
    assert figures[0]["published"] == figures[1]["published"]
    assert [row["published"] for row in figures[0]["published"]][:2] == [33.1, 25.8]


def test_the_text_holds_steps_and_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", "qwen3_6_35b", "--hardware", "b200", "--weights", "nvfp4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = {line.split("  ")[0].strip(): line for line in out.splitlines()}
    assert "9.1% of both" in lines["cache a token"]
    assert "5 native, 5 windowed" in lines["rows that fit"]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[1] for row in cells[:6]] == ["plain", "native", "windowed"] * 2
    assert ["native step ms", "26.40", "6.31", "-76 %", "24.81", "-6 %"] in cells


def test_a_cpu_plans_in_float32_without_constants_from_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, "--model proxy_35b --hardware cpu --context 32K --gamma 3")
    assert (out["options"]["weights"], out["options"]["cache"]) == ("float32", "float32")
    assert list(out["steps"]) == ["roofline"]
    assert out["cache_bytes_per_token"]["target"] == 10 * 2 * 2 * 64 * 4


def test_plain_decoding_and_native_alone_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(capsys, "--model demo --hardware h100 --context 4K --gamma 0")
    assert plain["steps"]["roofline"]["native"] is None
    assert plain["row_bytes"]["native"] == plain["row_bytes"]["pages"] + plain["row_bytes"]["state"]
    native = planned(capsys, "--model demo --hardware h100 --context 4K --window 0")
    assert native["steps"]["roofline"]["windowed"] is None
    assert native["row_bytes"]["native"] == native["row_bytes"]["windowed"]
    for arguments in ("--gamma 0", "--window 0"):
        assert run(f"plan --model demo --hardware h100 --context 4K {arguments}".split()) == 0
        assert "windowed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "warning"),
    [
        ("--model demo --hardware h200 --context 64K", "65536 tokens are more than the 32768"),
        ("--model qwen3_5_122b --hardware tpu-v6e", "the weights (249 GB) alone exceed the 27.2 GB"),
        ("--model qwen3_6_35b --hardware h200 --rows 9", "9 rows do not fit: 2 do"),
    ],
)
def test_what_may_not_work_is_a_warning(capsys: pytest.CaptureFixture[str], arguments: str, warning: str) -> None:
    assert run(["plan", *arguments.split(), "--json"]) == 0
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"warning: {warning}")
    assert json.loads(out)["warnings"] == [line.removeprefix("warning: ")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gpt --hardware h200", "gpt: no such preset or file; presets are demo, demo_mamba, nemotron_3_super"),
        ("--model demo --hardware a100", "--hardware a100: not known; give one of h200, h100, b200, tpu-v5e, tpu-v6e"),
        ("--model demo --hardware cpu --window 0 --sink 4", "--sink 4: needs a window"),
        ("--model demo --hardware cpu --context 0", "--context 0: must be 1 token or more"),
        ("--model demo --hardware cpu --context 1G", "--context 1G: must be a number of tokens such as 4096, 64K or"),
        ("--model demo --hardware cpu --gamma 9", "--gamma 9: must be 0 or more, at most 8"),
        ("--model demo --hardware cpu --window -1", "--window -1: must be 0 or more"),
        ("--model demo --hardware cpu --rows 0", "--rows 0: must be 1 or more"),
        ("--model demo --hardware cpu --weights int3", "--weights int3: not known; give one of bf16, fp8, nvfp4"),
        ("--model demo --hardware cpu --cache nvfp4", "--cache nvfp4: not known; give one of bf16, float16, int8"),
        ("--model demo --hardware cpu --cache ''", "--cache '': not known; give one of bf16, float16, int8"),
        ("--hardware cpu", "Missing option '--model'"),
        ("--model tests --hardware cpu", "tests: holds neither model.json nor config.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(["plan", *shlex.split(arguments)]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (out, line.startswith(f"wmtp: {message}")) == ("", True), line


def test_a_model_without_a_head_plans_only_plain_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = tmp_path / "headless.toml"
    text = (ROOT / "configs" / "demo.toml").read_text()
    preset.write_text(text.replace('mtp_pattern = ["attention", "dense"]', "mtp_pattern = []"))
    assert run(["plan", "--model", str(preset), "--hardware", "cpu"]) == 2
    assert "has no MTP head to draft with: use --gamma 0" in capsys.readouterr().err
    out = planned(capsys, f"--model {preset} --hardware cpu --gamma 0 --context 1K")
    assert (out["parameters"]["draft"], out["cache_bytes_per_token"]["draft_share"]) == (0, 0)


def test_folders_of_every_kind_are_read(tmp_path: Path) -> None:
    demo = read_sizes("demo")
    assert read_sizes(str(DEMO_FOLDER)) == demo
    shutil.copy(DEMO_FOLDER / "config.json", tmp_path / "config.json")
    assert read_sizes(str(tmp_path)) == demo
    converted = tmp_path / "converted"
    converted.mkdir()
    (converted / "model.json").write_text(config_to_json(CONFIGS["experts"]))
    assert read_sizes(str(converted)) == sizes_of_config(CONFIGS["experts"])


def test_a_preset_is_planned_without_loading_jax() -> None:
    code = (
        "import sys; from wmtp_jax.cli.main import run; code = run(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    )
    arguments = ["plan", "--model", "qwen3_5_122b", "--hardware", "h200", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {"jax", "flax", "orbax"} & set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1M", 2**20), ("64K", 65536), ("64k", 65536), ("1048576", 2**20), (" 7 ", 7), ("3m", 3 * 2**20)],
)
def test_tokens_read_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens
    assert parse_tokens(show_tokens(tokens)) == tokens


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-1", "1 M", "0K", "1e6", "٣", "9" * 13, "1MB"])
def test_other_spellings_of_tokens_are_refused_by_name(text: str) -> None:
    with pytest.raises(UserError, match=r"^--contexts .*: must be "):
        parse_tokens(text, "contexts")


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (23_686_709_248, "23.7 GB"),
        (999.6e6, "1.00 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_bytes_show_three_digits(size: float, shown: str) -> None:
    assert show_bytes(size) == shown


def test_a_model_without_attention_can_be_planned(tmp_path, capfd):
    path = tmp_path / "recurrent.toml"
    text = Path(__file__).parents[1].joinpath("bench/preset.toml").read_text()
    text = text.replace('"delta", "dense", "attention", "dense"', '"delta", "dense"')
    text = text.replace('mtp_pattern = ["attention", "dense"]', "")
    path.write_text(text)
    assert run(["plan", "--model", str(path), "--hardware", "cpu", "--gamma", "0", "--json"]) == 0
    assert capfd.readouterr().out.startswith("{")
