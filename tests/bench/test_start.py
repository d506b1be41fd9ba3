"""What `wmtp bench start` reads of a process, and what it says a run must hold."""

import os
import sys

import pytest

from tests.bench.folders import tiny
from wmtp_jax.bench.footprint import footprint
from wmtp_jax.bench.start import Footprint, run_once
from wmtp_jax.errors import UserError
from wmtp_jax.generation.stream import generate


def run(code: str):
    return run_once([sys.executable, "-c", code], dict(os.environ))


def test_text_comes_before_the_end_and_the_peak_holds_what_the_process_held() -> None:
    big = run("print('first', flush=True); held = b'x' * 2**29; import sys; sys.stderr.write('y' * 200_000)")
    assert 0 < big.first_text_seconds < big.end_seconds
    # Twice: another large child must not be taken for this one.
    small = run("print('text')")
    assert 2**29 < big.peak_bytes < 2**30
    assert small.peak_bytes < big.peak_bytes


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('text'); sys.exit('one\\nwmtp: prompt 0 is too long')", "code 1: wmtp: prompt 0 is too long"),
        ("pass", "code 0: it printed nothing"),
        ("import os; os.kill(os.getpid(), 9)", "code -9: it printed nothing"),
    ],
)
def test_a_failed_run_is_reported_with_its_own_last_line(code: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(code)


@pytest.mark.parametrize(("gamma", "window", "sink"), [(0, 0, 0), (3, 0, 0), (2, 7, 3)])
def test_the_footprint_is_what_a_run_allocates(gamma: int, window: int, sink: int) -> None:
    options = dict(max_new_tokens=6, gamma=gamma, window=window, sink=sink)
    stats = generate(tiny(), [[4] * 21], **options, ignore_eos=True).stats
    found = footprint(tiny(), 21, **options)
    assert found.caches_bytes >= stats.target_cache_bytes + stats.draft_cache_bytes + stats.recurrent_state_bytes
    # The page table, of one entry here.
    assert found.caches_bytes <= stats.target_cache_bytes + stats.draft_cache_bytes + stats.recurrent_state_bytes + 4


def test_what_is_beyond_weights_and_caches_is_the_rest() -> None:
    assert Footprint(weights_bytes=300, caches_bytes=40).rest(1000) == 660
