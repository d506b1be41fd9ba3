"""Mixed load for a while: good requests never fail, memory stays flat, and nothing is left behind.

``WMTP_SOAK_SECONDS`` says how long: with `WMTP_SOAK_SECONDS=600`, ten minutes; `-rP` prints what came of it.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

import wmtp_jax as wmtp
from tests.serve.serving import NAME, assert_idle, chat_model, serving
from wmtp_jax.engine.options import EngineOptions

SECONDS = float(os.environ.get("WMTP_SOAK_SECONDS", "20"))
# Fewer pages than rows can need, so that requests are preempted now and then; few enough waiting for some 429s.
ENGINE = EngineOptions(
    rows=4, context=64, page_size=8, chunk=8, pages=20, gamma=3, window=6, sink=2, steps=2, prefill_tokens=8, queue=8
)
PROMPTS = ["abc,12:", "edcba" * 6, "12,34,56,78,9", "abcabcabcabcabcabcabcabc{"]
SAMPLED = [dict(max_tokens=20, temperature=1.0, seed=seed) for seed in range(6)]
BUSY = 429


class Load:
    """What clients do, and what came of it."""

    def __init__(self, url: str, expected: dict[tuple[int, int], tuple[str, str]]):
        self.url = url + "/v1/completions"
        self.expected = expected
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def good(self, client: httpx.Client, rng: random.Random) -> None:
        """A text that is known beforehand, whole or streamed."""
        prompt, sampled, stream = rng.randrange(len(PROMPTS)), rng.randrange(len(SAMPLED)), rng.random() < 0.5
        given = {"model": NAME, "prompt": PROMPTS[prompt], "stream": stream, "ignore_eos": True, **SAMPLED[sampled]}
        pause = rng.choice((0, 0, 0, 0.05))
        with client.stream("POST", self.url, json=given) as response:
            if response.status_code == BUSY:
                self.counts["busy"] += 1
                time.sleep(0.05)
                return
            if stream:
                parts = []
                for line in response.iter_lines():
                    parts += [line.removeprefix("data: ")] if line else []
                    # A slow reader.
                    time.sleep(pause)
                if response.status_code != 200 or parts[-1] != "[DONE]":
                    raise AssertionError(f"{response.status_code}: {parts}")
                choices = [json.loads(part)["choices"][0] for part in parts[:-1]]
                got = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
            else:
                response.read()
                choice = response.json()["choices"][0]
                got = choice["text"], choice["finish_reason"]
        if got != self.expected[prompt, sampled]:
            raise AssertionError(f"{got}, not {self.expected[prompt, sampled]}")
        self.counts["good"] += 1

    def leaving(self, client: httpx.Client, rng: random.Random) -> None:
        """A client that goes in the middle."""
        given = {"model": NAME, "prompt": PROMPTS[1], "stream": True, "n": 2, "max_tokens": 30, "ignore_eos": True}
        with client.stream("POST", self.url, json=given) as response:
            for _ in zip(range(rng.randrange(6)), response.iter_lines(), strict=False):
                pass
        self.counts["left"] += 1

    def malformed(self, client: httpx.Client, rng: random.Random) -> None:
        """Bodies that are no request, and prompts that are too long."""
        body = rng.choice((b"{", b"[" * 9999, b"\x00\xff", b'{"model": "tiny"}', b"x" * 300_000))
        if rng.random() < 0.5:
            body = json.dumps({"model": NAME, "prompt": "a" * rng.randrange(61, 5000)}).encode()
        response = client.post(self.url, content=body, headers={"content-type": "application/json"})
        if response.status_code not in (400, 413) or not response.json()["error"]["message"]:
            raise AssertionError(f"{response.status_code}: {response.text}")
        self.counts["refused"] += 1
        # They cost so little that one client's would be most of the load.
        time.sleep(0.02)

    def bound(self, client: httpx.Client, rng: random.Random) -> None:
        """Text within a grammar."""
        form = {"type": "regex", "regex": "[a-c]{3}(:[0-9]){1,4}"}
        given = {"model": NAME, "prompt": "a", "max_tokens": 20, "response_format": form}
        response = client.post(self.url, json=given)
        if response.status_code == BUSY:
            self.counts["busy"] += 1
            return
        choice = response.json()["choices"][0]
        if choice["finish_reason"] != "stop" or choice["text"][3] != ":":
            raise AssertionError(str(choice))
        self.counts["bound"] += 1

    def keep_at_it(self, what: Callable[[httpx.Client, random.Random], None], seed: int, until: float) -> None:
        rng = random.Random(seed)
        with httpx.Client(timeout=120) as client:
            while time.monotonic() < until and not self.failures:
                try:
                    what(client, rng)
                except Exception as error:
                    self.failures.append(f"{what.__name__}: {type(error).__name__}: {error}")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures memory by Linux's /proc")
def test_mixed_load():
    expected = {}
    for prompt, text in enumerate(PROMPTS):
        for index, sampled in enumerate(SAMPLED):
            given = dict(temperature=1.0, seed=sampled["seed"], max_new_tokens=20, ignore_eos=True)
            out = wmtp.generate(chat_model(), text, gamma=0, page_size=64, chunk=16, **given)
            expected[prompt, index] = out.text[0], "length"
    with serving(ENGINE, warm_up=True, body_bytes=200_000) as server:
        load = Load(server.url, expected)
        # What every kind of request caches comes before memory is looked at.
        for what in (load.good, load.leaving, load.malformed, load.bound):
            load.keep_at_it(what, 0, time.monotonic() + 3)
        before = resident_bytes()
        until = time.monotonic() + SECONDS
        kinds = [load.good] * 6 + [load.leaving] * 2 + [load.malformed, load.bound]
        threads = [
            threading.Thread(target=partial(load.keep_at_it, what, seed, until)) for seed, what in enumerate(kinds)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        grown = resident_bytes() - before
        assert load.failures == []
        assert_idle(server)
        meter = server.service.engine.meter
        print(f"{dict(load.counts)}, {meter.preempted} preempted, {grown / 2**20:.1f} MiB more after {SECONDS:g} s")
        assert meter.preempted > 0
        assert min(load.counts[kind] for kind in ("good", "left", "refused", "bound")) > 0
        # Threads, buffers and the allocator's slack, whatever the time: a leak grows with the requests.
        assert grown < 64 * 2**20
