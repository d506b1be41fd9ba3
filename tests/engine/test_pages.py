"""Page accounting: by itself, and under ten thousand requests."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.requests import Heard, assert_nothing_is_held, make_core
from wmtp_jax.decode.loop import Emitted
from wmtp_jax.engine.pages import PagePool
from wmtp_jax.engine.prefixes import page_keys


@given(st.integers(1, 12), st.data())
def test_a_page_is_free_when_every_holder_has_given_it_back(pages, data):
    pool, held = PagePool(pages), []
    for _ in range(data.draw(st.integers(0, 40))):
        kind = data.draw(st.sampled_from(("take", "share", "give back")))
        if kind == "take":
            taken = pool.take(data.draw(st.integers(0, pool.free)))
            assert not {page for own in held for page in own} & set(taken)
            held += [taken] if taken else []
        elif held:
            own = data.draw(st.sampled_from(held))
            if kind == "share":
                pool.share(own)
                held.append(list(own))
            else:
                held.remove(own)
                pool.release(own)
        everywhere = [page for own in held for page in own]
        assert pool.free == pages - len(set(everywhere))
        assert all(pool.references(page) == everywhere.count(page) for page in range(pages))


def test_pages_of_nobody_are_neither_shared_nor_given_back():
    pool = PagePool(2)
    taken = pool.take(1)
    with pytest.raises(AssertionError, match="2 pages are taken where 1 are free"):
        pool.take(2)
    pool.release(taken)
    with pytest.raises(AssertionError, match="given back once too often"):
        pool.release(taken)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(taken)


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=30), st.integers(1, 7))
def test_keys_are_equal_as_far_as_whole_pages_are(one, two, size):
    same = 0
    while same < min(len(one), len(two)) and one[same] == two[same]:
        same += 1
    first, second = page_keys(one, size), page_keys(two, size)
    # The last token is always left to be read.
    assert len(first) == max(0, (len(one) - 1) // size)
    common = sum(a == b for a, b in zip(first, second, strict=False))
    assert common == min(same // size, len(first), len(second))


class NoDevice:
    """In place of an engine's programs: tokens at random, and checks that what is asked for makes sense."""

    def __init__(self, core: Any, seed: int):
        self._core, self._rng = core, np.random.default_rng(seed)
        self.chunks, self.drafter, self.chunk_for = core._slots.chunks, core.drafter, core._slots.chunk_for

    def clear(self, state, slot, most):
        return state

    def remember(self, state, slot, prompt, emitted):
        return state

    def keep(self, state, slot):
        return np.zeros(self._rng.integers(1, 9))

    def restore(self, state, slot, length, kept, following):
        return state

    def read(self, state, slot, table, tokens, begin):
        assert begin < len(tokens)
        return state

    def begin(self, state, slot, remaining, sampling, stops, known, allowed):
        assert remaining > 0
        return state, int(self._rng.integers(0, 20)) if known is None else known, None

    def run(self, state, slots, tables, sampling, stops, steps, drafting):
        own = [slot for slot in slots if slot < self._core.options.rows]
        assert len(set(own)) == len(own)
        tasks = [next(task for task in self._core.running if task.slot == slot) for slot in own]
        page, run = self._core.page_size, self.drafter.gamma + 1
        counts = np.zeros(len(slots), int)
        tokens = np.full((len(slots), steps * run), -1)
        written: list[int] = []
        for index, (task, table) in enumerate(zip(tasks, tables, strict=False)):
            left = task.options.max_new_tokens - len(task.emitted)
            counts[index] = min(left, sum(self._rng.integers(1, run + 1) for _ in range(steps)))
            tokens[index, : counts[index]] = self._rng.integers(4, 20, counts[index])
            # Every position that these steps can write has a page, and no page is written by two rows.
            reach = min(task.length + steps * run + run - 1, task.need)
            assert reach <= len(task.pages) * page
            assert table[: len(task.pages)].tolist() == task.pages
            written += set(task.pages[task.length // page :])
        assert len(set(written)) == len(written)
        return state, Emitted(tokens, counts, np.zeros(run, int), np.int32(steps), np.zeros_like(tokens, bool))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tight", "plain"])
def test_nothing_leaks_over_ten_thousand_requests(kind):
    core, rng = make_core(kind, prefix_bytes=100), np.random.default_rng(7)
    core._slots = NoDevice(core, 8)
    heard, live, total, cancelled = [], [], 0, 0
    beginnings = rng.integers(0, 29, (5, 40))
    while total < 10_000 or core.waiting or core.running:
        while total < 10_000 and len(core.waiting) < 12:
            new = int(rng.integers(1, 25))
            beginning = beginnings[rng.integers(5)][: rng.integers(0, 30)]
            prompt = [*beginning.tolist(), *rng.integers(0, 29, rng.integers(1, 6)).tolist()]
            heard.append(Heard())
            live.append(core.make_task(prompt, heard[-1], max_new_tokens=new, repetition_penalty=1.1))
            core.add(live[-1])
            total += 1
        core.turn()
        if rng.random() < 0.05:
            cancelled += core.cancel(live[rng.integers(max(0, len(live) - 30), len(live))])
        holders = [task.pages for task in core.running] + [own.pages for own in core.prefixes._entries.values()]
        assert sum(map(len, holders)) == sum(map(core.pool.references, range(core.pool.pages)))
    assert core.meter.preempted > 100
    assert core.meter.reused_tokens > 1000
    assert core.meter.finished + cancelled == total
    assert_nothing_is_held(core)
    for task, got in zip(live, heard, strict=True):
        assert not got.errors
        assert len(got.tokens) <= task.options.max_new_tokens
