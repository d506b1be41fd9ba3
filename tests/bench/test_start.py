"""What `wmtp bench start` reads of a process, and what it says a run must hold."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.folders import tiny
from wmtp_jax.bench.footprint import footprint
from wmtp_jax.bench.start import Footprint, Run, run_once
from wmtp_jax.errors import UserError
from wmtp_jax.generation.stream import generate

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> Run:
    return run_once([sys.executable, "-c", code], dict(os.environ))


MEASURE_TWO = """
import json, os, sys
from wmtp_jax.bench.start import run_once

def run(code):
    return vars(run_once([sys.executable, "-c", code], dict(os.environ)))

big = run("print('first', flush=True); held = b'x' * 2**29; import sys; sys.stderr.write('y' * 200_000)")
print(json.dumps([big, run("print('text')")]))
"""


def test_text_comes_before_the_end_and_the_peak_is_that_of_one_process() -> None:
    # From a process of its own: this one may have grown larger than what it would measure.
    out = subprocess.run([sys.executable, "-c", MEASURE_TWO], cwd=ROOT, capture_output=True, check=True, text=True)
    big, small = json.loads(out.stdout)
    assert 0 < big["first_text_seconds"] < big["end_seconds"]
    assert 2**29 < big["peak_bytes"] < 2**29 + 2**27
    assert small["peak_bytes"] < 2**27


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('text'); sys.exit('one\\nwmtp: prompt 0 is empty')", "code 1: wmtp: prompt 0 is empty"),
        ("pass", "code 0: it printed nothing"),
        ("import os; os.kill(os.getpid(), 9)", "code -9: it printed nothing"),
    ],
)
def test_a_failed_run_is_reported_with_its_own_last_line(code: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(code)


@pytest.mark.parametrize(("gamma", "window", "sink"), [(0, 0, 0), (3, 5, 2)])
def test_the_footprint_is_what_a_run_allocates(gamma: int, window: int, sink: int) -> None:
    options = dict(max_new_tokens=6, gamma=gamma, window=window, sink=sink)
    stats = generate(tiny(), [[4] * 21], **options, ignore_eos=True).stats
    found = footprint(tiny(), 21, **options)
    assert found.caches_bytes >= stats.target_cache_bytes + stats.draft_cache_bytes + stats.recurrent_state_bytes
    # The page table, of one entry here.
    assert found.caches_bytes <= stats.target_cache_bytes + stats.draft_cache_bytes + stats.recurrent_state_bytes + 4


def test_what_is_beyond_weights_and_caches_is_the_rest() -> None:
    assert Footprint(weights_bytes=300, caches_bytes=40).rest(1000) == 660
