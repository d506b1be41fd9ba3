"""Step costs: what is timed is what decoding does, what is counted is what it moves, and what does not fit is said."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmtp_jax.bench import step
from wmtp_jax.bench.machine import Machine, free_bytes
from wmtp_jax.bench.options import StepOptions
from wmtp_jax.bench.phases import run_phase
from wmtp_jax.bench.synthetic import SyntheticRows, noise, synthetic_model
from wmtp_jax.cli.main import run
from wmtp_jax.decode.drafter import MTPDrafter, draft_run
from wmtp_jax.decode.loop import verify
from wmtp_jax.decode.sampling import batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.models.parameters import pack
from wmtp_jax.presets import model_config, read_preset

PRESET = str(Path(__file__).parent / "preset.toml")
CONFIG = model_config(read_preset(PRESET), PRESET)
MACHINE = Machine(device="imagined", read_bandwidth=1e9, matrix_flops=1e10)
OPTIONS = StepOptions(gamma=2, window=30, sink=3, contexts=(300, 45), steps=2, repeats=2)
SAMPLING = batch_sampling([SamplingParams()])


@pytest.fixture(scope="module")
def model():
    return synthetic_model(CONFIG, "float32")


@pytest.fixture(scope="module")
def results(model):
    notes: list[str] = []
    measured = step.measure_steps(model, MACHINE, OPTIONS, notes.append)
    assert any("round 2 of 2" in line for line in notes)
    return measured


def test_every_mode_is_timed_at_every_context_shortest_first(results):
    assert [result.context for result in results] == [45, 300]
    for result in results:
        assert [mode.mode for mode in result.modes] == ["plain", "native", "windowed"]
        for mode in result.modes:
            spreads = [mode.step.ms, mode.host_ms, *(cost.ms for cost in mode.phases.values())]
            assert all(len(spread) == 2 and min(spread) > 0 for spread in spreads)
            assert ("draft_decode" in mode.phases) == (mode.mode != "plain")
        medians = {mode.mode: mode.step.ms.median for mode in result.modes}
        assert result.gain == pytest.approx(medians["native"] / medians["windowed"])


def test_counted_bytes_are_those_of_the_keys_values_and_weights_that_a_step_reads(results):
    position = 2 * 2 * 8 * 4
    for result in results:
        plain, native, windowed = result.modes
        for mode in result.modes:
            assert mode.phases["attention"].gigabytes * 1e9 == pytest.approx(2 * result.context * position)
        weights = native.phases["draft_decode"].gigabytes * 1e9 - 2 * (result.context + 1.5) * position
        head = CONFIG.vocab_size * CONFIG.hidden_size
        assert weights == pytest.approx(2 * 4 * (head + _mtp_parameters()), rel=0.02)
        seen = min(result.context, 33)
        gap = (native.phases["draft_decode"].gigabytes - windowed.phases["draft_decode"].gigabytes) * 1e9
        assert gap == pytest.approx(2 * (result.context - seen) * position, abs=1)
        limit = max(plain.step.gigabytes * 1e9 / 1e9, plain.step.gigaflops * 1e9 / 1e10)
        assert plain.step.roofline == pytest.approx(1e3 * limit / plain.step.ms.median)


def _mtp_parameters() -> int:
    width, inner = CONFIG.hidden_size, 4 * 8
    attention = width * (2 * inner + 2 * 2 * 8) + inner * width
    return 2 * width * width + attention + 3 * width * 40


def test_a_context_that_does_not_fit_is_left_out_with_its_need(model, monkeypatch: pytest.MonkeyPatch):
    only_plain = replace(OPTIONS, modes=("plain",), repeats=1)
    only_plain = replace(only_plain, contexts=(45, 20_000))
    small, large = (step._needed_bytes(model, only_plain, context) for context in (45, 20_000))
    monkeypatch.setattr(step, "free_bytes", lambda: (small + large) // 2)
    notes: list[str] = []
    fits, left_out = step.measure_steps(model, MACHINE, only_plain, notes.append)
    assert [fits.context, left_out.context] == [45, 20_000]
    assert [len(fits.modes), len(left_out.modes)] == [1, 0]
    assert any("20000: left out" in line for line in notes)


def test_free_memory_is_known_here():
    free = free_bytes()
    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize("phase", ["draft_extend", "draft_decode", "verify", "commit", "attention"])
def test_a_phase_repeated_computes_anew_each_time(model, phase):
    """Twice is once and once again, and not the first time over."""
    drafter = MTPDrafter(gamma=2, window=30, sink=3)
    once, again, twice = (rows_state(model, drafter) for _ in range(3))
    packed = pack(model)
    once = run_phase(phase, packed, drafter, once, SAMPLING, jnp.int32(1))
    kept = [np.asarray(x) for x in jax.tree.leaves(once)]
    after = run_phase(phase, packed, drafter, once, SAMPLING, jnp.int32(1))
    twice = run_phase(phase, packed, drafter, twice, SAMPLING, jnp.int32(2))
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(twice), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    start = [np.asarray(x) for x in jax.tree.leaves(again)]
    assert any(not np.array_equal(a, b) for a, b in zip(start, kept, strict=True))
    assert any(not np.array_equal(a, np.asarray(b)) for a, b in zip(kept, jax.tree.leaves(after), strict=True))


def rows_state(model, drafter):
    return SyntheticRows(model, {"it": drafter}, 64, 1, jnp.float32)._state("it", 45)


def test_phases_do_what_a_step_does(model):
    drafter = MTPDrafter(gamma=2, window=30, sink=3)
    state, packed = rows_state(model, drafter), pack(model)
    tokens, _, ring = jax.jit(lambda m, s: draft_run(m, s, 2, SAMPLING))(model, state)
    extended = run_phase("draft_extend", packed, drafter, rows_state(model, drafter), SAMPLING, jnp.int32(1))
    extended = replace(extended, committed=replace(extended.committed, tokens=state.committed.tokens))
    drafted = run_phase("draft_decode", packed, drafter, extended, SAMPLING, jnp.int32(1))
    np.testing.assert_array_equal(drafted.pending, tokens[:, -1])
    np.testing.assert_allclose(drafted.draft.keys, ring.keys, atol=1e-6)
    drafts = (state.pending[:, None] + 1 + jnp.arange(2)) % CONFIG.vocab_size
    choices = jax.jit(verify)(model, state, drafts, SAMPLING).choices
    verified = run_phase("verify", packed, drafter, rows_state(model, drafter), SAMPLING, jnp.int32(1))
    np.testing.assert_array_equal(verified.pending, choices[:, -1])


@pytest.mark.parametrize("shape", [(1000, 7, 3), (5, 4001)])
def test_synthetic_numbers_have_their_mean_and_deviation_and_no_pattern_along_any_axis(shape):
    x = np.asarray(noise(shape, jnp.float32, 0.5, 3, mean=2.0), np.float64)
    assert abs(x.mean() - 2.0) < 0.02
    assert abs(x.std() - 0.5) < 0.02
    flat = (x - x.mean()) / x.std()
    for axis in range(x.ndim):
        a, b = np.split(np.moveaxis(flat, axis, 0), [shape[axis] - 1])[0], np.moveaxis(flat, axis, 0)[1:]
        assert abs((a * b).mean()) < 5 / math.sqrt(a.size)
    assert len(np.unique(x)) > 0.99 * x.size


def test_the_command_prints_json_and_draws_a_picture(tmp_path: Path, capfd):
    sizes = ["--contexts", "45", "--repeats", "1", "--steps", "2", "--gamma", "2", "--window", "30", "--sink", "3"]
    picture = tmp_path / "step.png"
    assert run(["bench", "step", "--preset", PRESET, *sizes, "--json", "--plot", str(picture)]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert [mode["mode"] for mode in shown["contexts"][0]["modes"]] == ["plain", "native", "windowed"]
    assert shown["machine"]["read_bandwidth"] > 1e8
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--contexts", "0"], "--contexts 0"),
        (["--contexts", "4K,4096"], "--contexts"),
        (["--contexts", "many"], "--contexts many"),
        (["--gamma", "0"], "--gamma 0"),
        (["--gamma", "9"], "--gamma 9"),
        (["--window", "0"], "--window 0"),
        (["--modes", "plain,fast"], "--modes: 'fast'"),
        (["--dtype", "int4"], "--dtype int4"),
        (["--dtype", ""], "--dtype '': must be one of float32, bfloat16"),
        (["--cache-dtype", ""], "--cache-dtype '': not known; give one of float32, bfloat16"),
        (["--kernels", ""], "kernels '' do not exist: take one of reference, xla"),
        (["--preset", "none"], "none: no such preset"),
        (["--preset", "nemotron_3_super"], "the weights alone do not fit"),
        (["--plot", "steps.pdf"], "--plot steps.pdf"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_options_give_one_line_and_exit_code_2(arguments, named, capfd):
    code = run(["bench", "step", "--preset", PRESET, *arguments])
    shown = capfd.readouterr().err.strip()
    assert code == 2
    assert named in shown
    assert "Traceback" not in shown
