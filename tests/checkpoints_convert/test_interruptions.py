"""A conversion that is cut short leaves the old folder or none, never a half."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints_convert.convert
from checkpoints_convert import load_hf
from checkpoints_convert.convert import convert
from tests.checkpoints_convert.folders import CONFIGS, assert_same_model, random_tensors, write, write_kind
from wmtp_jax.checkpoint import load_checkpoint
from wmtp_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

# Says where it is, then waits to be killed: half way through the weights, or between the two renames of a swap.
CHILD = """
import pathlib, sys, time
import checkpoints_convert.convert as c
c.PART_BYTES = 20000
stage, source, out = sys.argv[1:]

def stop():
    print("here", flush=True)
    time.sleep(600)

def progress(done, total):
    if stage == "half" and done > total / 2:
        stop()

rename = pathlib.Path.rename
def halting_rename(self, target):
    if stage == "swap" and ".building." in self.name:
        stop()
    return rename(self, target)

pathlib.Path.rename = halting_rename
c.convert(source, out, force=True, progress=progress)
"""


def kill_at(stage: str, source: Path, out: Path) -> None:
    command = [sys.executable, "-c", CHILD, stage, str(source), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


@pytest.fixture
def old_and_new(tmp_path):
    """Two checkpoints of one shape, and an OUT that holds the old one."""
    old = write(tmp_path / "old", CONFIGS["qwen2"], random_tensors(CONFIGS["qwen2"], seed=1))
    new = write(tmp_path / "new", CONFIGS["qwen2"], random_tensors(CONFIGS["qwen2"], seed=2))
    parent = tmp_path / "parent"
    convert(old, parent / "out")
    return old, new, parent / "out"


def assert_holds(out: Path, source: Path) -> None:
    assert_same_model(load_checkpoint(out, dtype=jnp.bfloat16)[1], load_hf(source, dtype=jnp.bfloat16)[1])


def test_kill_9_half_way_leaves_nothing_and_the_next_run_cleans_up(tmp_path):
    source, parent = write_kind(tmp_path / "hf", "qwen2"), tmp_path / "parent"
    kill_at("half", source, parent / "out")
    (left,) = parent.iterdir()
    assert left.name.startswith(".out.building.")
    assert any(left.rglob("*"))
    convert(source, parent / "out")
    assert [path.name for path in parent.iterdir()] == ["out"]
    assert_holds(parent / "out", source)


def test_kill_9_half_way_through_a_replacement_leaves_the_old_folder(old_and_new):
    old, new, out = old_and_new
    kill_at("half", new, out)
    assert_holds(out, old)
    convert(new, out, force=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert_holds(out, new)


def test_kill_9_between_the_renames_of_a_swap_loses_nothing(old_and_new):
    old, new, out = old_and_new
    kill_at("swap", new, out)
    assert not out.exists()
    with pytest.raises(UserError, match="exists already"):
        convert(new, out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert_holds(out, old)


def test_an_existing_folder_is_only_replaced_with_force(old_and_new):
    old, new, out = old_and_new
    with pytest.raises(UserError, match="exists already"):
        convert(new, out)
    assert_holds(out, old)
    convert(new, out, force=True)
    assert_holds(out, new)


def test_a_failed_replacement_keeps_the_old_folder(old_and_new, tmp_path):
    old, _, out = old_and_new

    def damage(tensors):
        tensors["model.norm.weight"][2] = np.nan

    with pytest.raises(UserError, match="NaN"):
        convert(write_kind(tmp_path / "damaged", "qwen2", damage), out, force=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert_holds(out, old)


def test_an_interrupt_removes_what_was_begun(tmp_path):
    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(write_kind(tmp_path / "hf", "qwen2"), tmp_path / "parent/out", progress=progress)
    assert list((tmp_path / "parent").iterdir()) == []


def test_two_runs_at_once_disturb_neither_each_other_nor_the_first_to_finish(tmp_path):
    source, parent = write_kind(tmp_path / "hf", "qwen2"), tmp_path / "parent"
    other = write(tmp_path / "other", CONFIGS["qwen2"], random_tensors(CONFIGS["qwen2"], seed=5))

    def progress(done, total):
        if not (parent / "out").exists():
            convert(other, parent / "out")
            assert len(list(parent.glob(".out.building.*"))) == 1

    with pytest.raises(UserError, match="exists already"):
        convert(source, parent / "out", progress=progress)
    assert [path.name for path in parent.iterdir()] == ["out"]
    assert_holds(parent / "out", other)


def test_a_file_in_the_way_is_never_replaced(tmp_path):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(UserError, match="is a file"):
        convert(write_kind(tmp_path / "hf", "qwen2"), tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text() == "precious"


def test_a_write_limit_is_one_clear_line_and_leaves_nothing(tmp_path):
    source = write_kind(tmp_path / "hf", "qwen2")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, hard))
    try:
        with pytest.raises(UserError) as error:
            convert(source, tmp_path / "parent/out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "disk is full" in str(error.value)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "parent").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_fills_up_half_way_is_one_clear_line_and_leaves_nothing(tmp_path, small_disk, monkeypatch):
    monkeypatch.setattr(checkpoints_convert.convert, "PART_BYTES", 10000)
    filler = small_disk / "filler"

    def progress(done, total):
        if done > total / 2 and not filler.exists():
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * 4096)

    with pytest.raises(UserError) as error:
        convert(write_kind(tmp_path / "hf", "qwen2"), small_disk / "out", progress=progress)
    assert "disk is full" in str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, small_disk):
    config = json.loads(json.dumps(CONFIGS["qwen2"])) | {"vocab_size": 30000}
    source = write(tmp_path / "hf", config, random_tensors(config))
    with pytest.raises(UserError, match=r"needs 0.00 GB|needs .* GB, but the disk has"):
        convert(source, small_disk / "out")
    assert list(small_disk.iterdir()) == []
