"""The script for the day when there is a GPU, run dry: tiny shapes, kernels interpreted."""

import json

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from wmtp_jax.bench import gpu_check

FIGURES = "machine,bandwidth,verify_attention,other_kernels"
has_interpreter = hasattr(plgpu, "InterpretGPUParams")


def results(out, section):
    report = json.loads((out / gpu_check.FILE).read_text())
    assert "error" not in report["sections"][section]
    return report["sections"][section]["results"]


@pytest.mark.slow
def test_a_dry_run_compares_every_implementation_of_every_kernel(tmp_path):
    kernels = ["paged_attention", "sink_window_attention", "gated_delta_rule", "mamba2_ssd"]
    assert gpu_check.run(tmp_path, minutes=20, dry_run=True, only=",".join(kernels)) == 0
    for kernel in kernels:
        found = results(tmp_path, kernel)
        assert all(r["passed"] for r in found if r["name"].endswith(", xla"))
        mosaic = [r for r in found if r["name"].endswith(", mosaic_gpu")]
        assert 2 * len(mosaic) == len(found)
        assert all(r["passed"] if has_interpreter else "skipped" in r for r in mosaic)


@pytest.mark.slow
def test_bandwidth_and_the_share_of_it_that_attention_reaches_are_measured(tmp_path):
    assert gpu_check.run(tmp_path, minutes=20, dry_run=True, only=FIGURES) == 0
    assert results(tmp_path, "machine")[0]["jax"] == jax.__version__
    copied, product = results(tmp_path, "bandwidth")
    assert copied["gb_per_s"] > 0
    assert product["tflop_per_s"] > 0
    shares = json.loads((tmp_path / gpu_check.FILE).read_text())["shares"]
    xla = next(r for r in results(tmp_path, "verify_attention") if r["name"].startswith("xla"))
    assert shares == {xla["name"]: pytest.approx(xla["gb_per_s"] / copied["gb_per_s"])}


def test_a_section_that_cannot_run_is_recorded_and_the_rest_goes_on(tmp_path):
    """Not a dry run, on a machine that has no GPU."""
    assert gpu_check.run(tmp_path, only="machine,bandwidth") == 1
    sections = json.loads((tmp_path / gpu_check.FILE).read_text())["sections"]
    assert list(sections) == ["machine", "bandwidth"]
    assert all("needs a GPU and JAX found a CPU" in section["error"] for section in sections.values())


def test_what_comes_after_the_time_limit_is_not_begun(tmp_path):
    assert gpu_check.run(tmp_path, minutes=0.001, dry_run=True, only="paged_attention") == 1
    section = json.loads((tmp_path / gpu_check.FILE).read_text())["sections"]["paged_attention"]
    assert section == {"error": "the time was up before it began", "results": []}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--minutes", "0"], "--minutes 0: give a positive"),
        (["--only", "bandwidth,flux"], "--only flux: no such section"),
    ],
)
def test_bad_input_is_one_line(options, said, tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("result", "passes"),
    [({"passed": True}, True), ({"passed": False}, False), ({"error": "x"}, False), ({"ms": 1.0}, True)],
)
def test_one_bad_figure_fails_its_section(result, passes):
    assert gpu_check.passed({"results": [{"name": "first", "passed": True}, result]}) is passes
