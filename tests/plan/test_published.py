"""How far the model is from the published step costs, where its constants come from, and what the docs say of both."""

import re
from pathlib import Path
from statistics import geometric_mean

import pytest

from wmtp_jax.plan.hardware import HARDWARE
from wmtp_jax.plan.options import PlanOptions
from wmtp_jax.plan.plan import make_plan
from wmtp_jax.plan.published import PUBLISHED, PUBLISHED_FORWARD_MS, compare, is_published
from wmtp_jax.plan.roofline import CALIBRATED, ROOFLINE, Constants, Setting, speculative_step
from wmtp_jax.plan.source import read_sizes
from wmtp_jax.units import parse_tokens

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
# Percent by which roofline and calibrated model are off: native and windowed step, gain.
OFFS = {
    "qwen3_6_35b": ((-76, -75, -6), (-6, -2, -4)),
    "qwen3_5_122b": ((-72, -70, -7), (-14, -13, 0)),
    "nemotron_3_super": ((-80, -77, -11), (-48, -46, -3)),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_predictions_are_as_far_off_as_stated(model: str) -> None:
    rows = {row.what: row for row in compare(model, read_sizes(model))}
    asked = [rows[what] for what in ("native step ms", "windowed step ms", "gain of windowed")]
    roofline, calibrated = OFFS[model]
    assert [100 * row.roofline_off for row in asked] == pytest.approx(roofline, abs=0.6)
    assert [100 * row.calibrated_off for row in asked] == pytest.approx(calibrated, abs=0.6)


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_documented_table_is_the_computed_one(model: str) -> None:
    section = DOCS.read_text().split(f"`wmtp plan --model {model} --hardware b200`\n")[1].strip().split("\n\n")[0]
    documented = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[2:]]
    computed = [
        [
            row.what,
            f"{row.published:.2f}",
            f"{row.roofline:.2f}",
            f"{round(100 * row.roofline_off):+d} %",
            f"{row.calibrated:.2f}",
            f"{round(100 * row.calibrated_off):+d} %",
        ]
        for row in compare(model, read_sizes(model))
    ]
    assert documented == computed


def test_the_attention_efficiency_is_the_mean_of_the_published_growths() -> None:
    growths = [next(row for row in compare(model, read_sizes(model)) if "growth" in row.what) for model in PUBLISHED]
    assert geometric_mean(row.roofline / row.published for row in growths) == pytest.approx(
        CALIBRATED.attention_efficiency, abs=0.005
    )


def test_the_launch_is_what_bytes_leave_of_a_published_draft_forward() -> None:
    setting = Setting(weights="nvfp4", cache="bf16", context=1_040_000, rows=1, gamma=6)
    no_launch = Constants(name="bytes", attention_efficiency=CALIBRATED.attention_efficiency, launch_s=0.0)
    step = speculative_step(read_sizes("qwen3_6_35b"), setting, HARDWARE["b200"], no_launch, window=4032, sink=64)
    rest_ms = PUBLISHED_FORWARD_MS - step.draft_decode_ms / 6
    assert rest_ms == pytest.approx(1e3 * CALIBRATED.launch_s, abs=0.005)


def test_no_published_step_beats_the_roofline() -> None:
    for model in PUBLISHED:
        for row in compare(model, read_sizes(model)):
            assert row.roofline < row.published, (model, row.what)


def test_only_published_settings_are_compared() -> None:
    assert is_published("qwen3_6_35b", "b200", 6)
    assert not is_published("qwen3_6_35b", "h200", 6)
    assert not is_published("qwen3_6_35b", "b200", 3)
    assert not is_published("proxy_35b", "b200", 6)


def test_the_documented_hardware_is_the_table() -> None:
    text = DOCS.read_text()
    for hardware in HARDWARE.values():
        (line,) = re.findall(rf"^\| {hardware.name} \|.*$", text, re.MULTILINE)
        memory, bandwidth, rate = (float(re.sub(r"[^\d.]", "", cell.split()[0])) for cell in line.split("|")[2:5])
        unit = 2**30 if "GiB" in line else 1e9
        assert memory * unit == hardware.memory_bytes
        assert bandwidth * (1e12 if "TB/s" in line else 1e9) == pytest.approx(hardware.bandwidth)
        assert rate * 1e12 == pytest.approx(hardware.matrix_flops)


@pytest.mark.parametrize("context", ["64K", "256K", "1M"])
def test_the_documented_expectations_are_the_computed_ones(context: str) -> None:
    options = PlanOptions(model="qwen3_6_35b", hardware="h200", context=parse_tokens(context))
    plan = make_plan(options)
    cells = [context, f"{plan.rows_native} / {plan.rows_windowed}"]
    for costs in plan.steps:
        assert costs.native is not None
        assert costs.windowed is not None
        steps = (costs.plain, costs.native, costs.windowed)
        cells += [", ".join(f"{step.step_ms:.2f}" for step in steps) + " ms", f"{costs.gain:.2f}x"]
    assert f"| {' | '.join(cells)} |" in DOCS.read_text().splitlines()


def test_the_roofline_has_no_constants_of_its_own() -> None:
    assert (ROOFLINE.attention_efficiency, ROOFLINE.launch_s) == (1.0, 0.0)
