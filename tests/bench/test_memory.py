"""Admitted rows: counted by allocating them, and as many as their planned bytes allow."""

import json
from pathlib import Path

import pytest

from wmtp_jax.bench.memory import measure_memory
from wmtp_jax.bench.options import MemoryOptions
from wmtp_jax.cli.main import run
from wmtp_jax.errors import UserError
from wmtp_jax.plan.memory import row_bytes
from wmtp_jax.plan.sizes import sizes_of_config
from wmtp_jax.presets import model_config, read_preset

PRESET = str(Path(__file__).parent / "preset.toml")
CONFIG = model_config(read_preset(PRESET), PRESET)


@pytest.mark.parametrize(("dtype", "planned"), [("float32", "float32"), ("bfloat16", "bf16")])
def test_a_pool_admits_the_rows_that_planning_says_and_more_of_them_with_rings(dtype, planned):
    shape = dict(context=2048, gamma=4, window=90, sink=5)
    row = row_bytes(sizes_of_config(CONFIG), planned, planned, **shape)
    pool = 4 * row.native + row.windowed
    notes: list[str] = []
    native, windowed = measure_memory(CONFIG, MemoryOptions(pool_bytes=pool, dtype=dtype, **shape), notes.append)
    for admission, size in ((native, row.native), (windowed, row.windowed)):
        table = admission.row_bytes - size
        # The page table is all that planning leaves out.
        assert 0 <= table <= 4 * 2048 / 256
        assert admission.rows == pool // int(admission.row_bytes)
    assert windowed.rows > native.rows == 4
    assert len(notes) == native.rows + windowed.rows
    assert native.draft_share == pytest.approx(1 / 3, rel=1e-3)
    assert windowed.draft_share < 0.04


def test_a_pool_too_small_for_a_row_is_refused_with_the_row_s_bytes():
    with pytest.raises(UserError, match=r"--pool: 100 kB hold no row of 2K tokens, which takes \d+ kB"):
        measure_memory(CONFIG, MemoryOptions(pool_bytes=100_000, context=2048), lambda _: None)


def test_the_command_prints_rows_of_both_kinds(capfd):
    sizes = ["--pool", "2.5MB", "--context", "2K", "--window", "90", "--sink", "5", "--gamma", "3"]
    assert run(["bench", "memory", "--preset", PRESET, *sizes, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)["admissions"]
    assert [row["mode"] for row in shown] == ["native", "windowed"]
    assert run(["bench", "memory", "--preset", PRESET, *sizes]) == 0
    assert "2.50 MB for rows of 2K tokens" in " ".join(capfd.readouterr().out.split())


@pytest.mark.parametrize("pool", ["8", "lots", "-1GB", "1e3GB"])
def test_a_bad_amount_of_memory_is_named(pool, capfd):
    assert run(["bench", "memory", "--preset", PRESET, "--pool", pool]) == 2
    assert f"--pool {pool}: must be an amount of memory" in capfd.readouterr().err
