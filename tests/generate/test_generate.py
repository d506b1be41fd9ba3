"""Generation end to end on a tiny random hybrid model: its text, its ends, its measurements."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import wmtp_jax as wmtp
from tests.generate.drafters import TextDrafter
from tests.generate.tiny import VOCAB, write_tiny
from wmtp_jax.decode.drafter import Plain
from wmtp_jax.generation.stream import Stream

NEW = 40
PROMPT = "The quick brown fox"
# What most tests share, so that few programs are compiled.
SMALL = dict(window=16, sink=2, page_size=64, chunk=32, ignore_eos=True)
PLAIN = SMALL | dict(gamma=0)


@pytest.fixture(scope="module")
def plain(model: wmtp.Model) -> wmtp.Generation:
    """What plain decoding says."""
    return wmtp.generate(model, PROMPT, max_new_tokens=NEW, **PLAIN)


@pytest.fixture(scope="module")
def drafter(model: wmtp.Model, plain: wmtp.Generation) -> TextDrafter:
    """Three drafts a step, always right."""
    return TextDrafter(gamma=3, text=(*model.encode(PROMPT), *plain.tokens[0]))


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of JAX's tracing and compiling events, as they happen."""
    events: list[str] = []

    def listen(name: str, seconds: float, **_: Any) -> None:
        if name.startswith("/jax/core/compile/"):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def with_eos(model: wmtp.Model, *eos: int) -> wmtp.Model:
    return dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=eos))


def position_in_a_run(tokens: list[int], offset: int, gamma: int) -> int:
    """The first place of a token that occurs nowhere before it and stands ``offset`` deep in an accepted run."""
    run = gamma + 1
    return next(i for i in range(1 + run, len(tokens)) if (i - 1) % run == offset and tokens[i] not in tokens[:i])


def test_greedy_text_is_the_argmax_of_the_uncached_logits(model: wmtp.Model) -> None:
    ids = model.encode(PROMPT)
    for prompt in (ids[:1], ids[:4], ids):
        out = wmtp.generate(model, prompt, max_new_tokens=12, **SMALL | dict(gamma=3)).tokens[0]
        whole = np.zeros(64, np.int32)
        whole[: len(prompt) + 12] = [*prompt, *out]
        best = np.argmax(wmtp.logits(model, whole)[0], axis=-1)
        assert out == best[len(prompt) - 1 : len(prompt) + 11].tolist()


@pytest.mark.parametrize(
    "options",
    [
        dict(window=16, sink=2, chunk=32, page_size=64),
        dict(window=0, chunk=32, page_size=64),
        dict(gamma=8, window=5, sink=0, chunk=8, page_size=16, steps_per_read=3),
    ],
)
def test_text_is_the_same_whatever_the_drafts_chunks_and_pages(
    model: wmtp.Model, plain: wmtp.Generation, options: dict[str, Any]
) -> None:
    out = wmtp.generate(model, PROMPT, max_new_tokens=NEW, ignore_eos=True, **options)
    assert (out.tokens, out.text, out.finished) == (plain.tokens, plain.text, ["length"])
    assert out.text == [model.decode(out.tokens[0])]


@pytest.mark.parametrize("gamma", [0, 3, 8])
def test_no_row_gets_a_token_more_than_it_may(model: wmtp.Model, plain: wmtp.Generation, gamma: int) -> None:
    drafter = TextDrafter(gamma=gamma, text=(*model.encode(PROMPT), *plain.tokens[0])) if gamma else Plain()
    for count in (1, 2, gamma + 1, gamma + 2, gamma + 3, 17):
        out = wmtp.generate(model, PROMPT, max_new_tokens=count, drafter=drafter, **SMALL)
        assert out.tokens == [plain.tokens[0][:count]]
        assert out.finished == ["length"]
        assert out.stats.verify_steps == -(-(count - 1) // (gamma + 1))


def test_no_new_tokens_are_an_empty_text(model: wmtp.Model) -> None:
    events = list(wmtp.stream(model, [PROMPT, "fox"], max_new_tokens=0))
    assert events == [wmtp.Event(row=row, text="", tokens=[], finished="length") for row in (0, 1)]
    out = wmtp.generate(model, PROMPT, max_new_tokens=0)
    assert (out.tokens, out.text, out.finished, out.stats.new_tokens) == ([[]], [""], ["length"], 0)


@pytest.mark.parametrize("offset", [0, 2, 3])
def test_an_end_of_text_token_inside_an_accepted_run_ends_there(
    model: wmtp.Model, plain: wmtp.Generation, drafter: TextDrafter, offset: int
) -> None:
    tokens = plain.tokens[0]
    end = position_in_a_run(tokens, offset, drafter.gamma)
    ending = with_eos(model, tokens[end], 1)
    out = wmtp.generate(ending, PROMPT, max_new_tokens=NEW, drafter=drafter, **SMALL | dict(ignore_eos=False))
    assert out.tokens == [tokens[: end + 1]]
    assert out.text == [model.decode(tokens[:end])]
    assert out.finished == ["stop"]
    assert out.stats.verify_steps == (end - 1) // 4 + 1


def test_an_end_of_text_token_that_comes_first_ends_at_once(model: wmtp.Model, plain: wmtp.Generation) -> None:
    first = plain.tokens[0][0]
    out = wmtp.generate(with_eos(model, first, 1), PROMPT, **PLAIN | dict(ignore_eos=False))
    assert (out.tokens, out.text, out.finished) == ([[first]], [""], ["stop"])
    assert out.stats.verify_steps == 0


def test_a_row_that_ends_with_its_first_token_takes_no_step(model: wmtp.Model) -> None:
    prompts, options = [PROMPT, "Der Käse", "fox"], PLAIN | dict(max_new_tokens=12, steps_per_read=2)
    free = wmtp.generate(model, prompts, **options).tokens
    assert free[1][0] not in free[0] + free[2]
    ending = with_eos(model, free[1][0], 1)
    out = wmtp.generate(ending, prompts, **options | dict(ignore_eos=False))
    assert out.tokens == [free[0], free[1][:1], free[2]]
    assert out.stats.accepted_histogram == [2 * 11]


def test_a_stop_string_cuts_inside_a_run_and_ends_the_loop(
    model: wmtp.Model, plain: wmtp.Generation, drafter: TextDrafter
) -> None:
    tokens, text = plain.tokens[0], plain.text[0]
    tried = 0
    for begin in range(2, len(text) - 3, 3):
        stop = text[begin : begin + 3]
        if "\ufffd" in stop:
            continue
        tried += 1
        out = wmtp.generate(model, PROMPT, max_new_tokens=NEW, drafter=drafter, stop=["absent", stop], **SMALL)
        completed = next(k for k in range(1, NEW + 1) if stop in model.decode(tokens[:k]))
        assert out.text == [text[: text.index(stop)]]
        assert out.tokens == [tokens[:completed]]
        assert out.finished == ["stop string"]
        assert out.stats.verify_steps <= 8 * -(-(completed - 1) // 32)
    assert tried > 3


def test_a_row_that_a_stop_string_ended_does_not_keep_the_others_from_going_on(model: wmtp.Model) -> None:
    prompts, options = [PROMPT, "Der Käse", "a"], PLAIN | dict(max_new_tokens=NEW, steps_per_read=2)
    free = wmtp.generate(model, prompts, **options)
    stop = free.text[1][3:5]
    out = wmtp.generate(model, prompts, stop=stop, **options)
    assert out.finished[1] == "stop string"
    for row, text in enumerate(free.text):
        assert out.text[row] == text.split(stop)[0]
    histogram_steps = sum(out.stats.accepted_histogram)
    assert histogram_steps < sum(free.stats.accepted_histogram)


def test_rows_of_a_batch_say_what_each_says_alone(model: wmtp.Model) -> None:
    prompts = ["a", PROMPT, "Der Käse, die Brücke und das Gemüse. Smile 😀🙂"]
    options = SMALL | dict(gamma=3, temperature=1.0, top_p=0.95, max_new_tokens=20)
    together = wmtp.generate(model, prompts, seed=11, **options)
    alone = [wmtp.generate(model, prompt, seed=11 + row, **options) for row, prompt in enumerate(prompts)]
    assert together.tokens == [out.tokens[0] for out in alone]
    assert together.text == [out.text[0] for out in alone]
    assert together.stats.prompt_tokens == sum(out.stats.prompt_tokens for out in alone)
    repeated = wmtp.generate(model, [PROMPT] * 3, seed=[5, 6, 5], **options)
    assert repeated.tokens[0] == repeated.tokens[2] != repeated.tokens[1]


def test_nothing_is_compiled_after_a_first_call(
    model: wmtp.Model, plain: wmtp.Generation, compilations: list[str]
) -> None:
    options = SMALL | dict(gamma=3, max_new_tokens=NEW)
    jax.jit(lambda x: x + 1)(7)
    assert compilations
    wmtp.generate(model, PROMPT, temperature=0.9, top_p=0.9, **options)
    wmtp.generate(model, PROMPT, **options)
    compilations.clear()
    for prompt in (PROMPT, "a", [7] * 17):
        wmtp.generate(model, prompt, **options)
    wmtp.generate(model, PROMPT, **options | dict(max_new_tokens=NEW - 3))
    wmtp.generate(model, PROMPT, temperature=0.5, top_p=0.8, seed=3, **options)
    cut = wmtp.generate(model, PROMPT, stop=plain.text[0][-5:-2], **options)
    assert cut.finished == ["stop string"]
    assert compilations == []


def test_events_join_to_the_text_and_each_row_ends_once(model: wmtp.Model) -> None:
    prompts, options = [PROMPT, "Der Käse", "a"], PLAIN | dict(max_new_tokens=NEW, steps_per_read=2)
    running = wmtp.stream(model, prompts, **options)
    events = list(running)
    whole = wmtp.generate(model, prompts, **options)
    assert (running.generation().tokens, running.generation().text) == (whole.tokens, whole.text)
    for row in range(3):
        own = [event for event in events if event.row == row]
        assert "".join(event.text for event in own) == whole.text[row]
        assert [token for event in own for token in event.tokens] == whole.tokens[row]
        assert [event.finished for event in own] == [None] * (len(own) - 1) + ["length"]
        assert len(own) > 10


def test_a_stream_can_be_left_and_says_what_it_gave(model: wmtp.Model, plain: wmtp.Generation) -> None:
    running: Stream = wmtp.stream(model, PROMPT, max_new_tokens=NEW, **PLAIN)
    first, second = next(running), next(running)
    assert running.generation().tokens == [first.tokens + second.tokens]
    assert first.tokens + second.tokens == plain.tokens[0][: 1 + 8]


def test_figures_add_up(model: wmtp.Model, plain: wmtp.Generation) -> None:
    text = (*model.encode(PROMPT), *plain.tokens[0])
    out = wmtp.generate(
        model, PROMPT, max_new_tokens=NEW, drafter=TextDrafter(gamma=3, text=text, wrong_every=5), **SMALL
    )
    stats = out.stats
    assert out.tokens == plain.tokens
    assert (stats.prompt_tokens, stats.new_tokens) == (len(model.encode(PROMPT)), NEW)
    histogram = np.array(stats.accepted_histogram)
    assert histogram.sum() == stats.verify_steps
    assert (histogram > 0).sum() > 1
    assert 1 + histogram @ np.arange(1, 5) == NEW
    assert stats.acceptance_length == pytest.approx((NEW - 1) / stats.verify_steps)
    assert 1 + np.cumprod(stats.acceptance_by_position).sum() == pytest.approx(stats.acceptance_length)
    assert stats.tpot_ms == pytest.approx(stats.step_ms / stats.acceptance_length)
    assert stats.tokens_per_second == pytest.approx((NEW - 1) / stats.decode_seconds)
    assert 0 < stats.prefill_seconds <= stats.first_token_seconds
    assert stats.target_cache_bytes == 2 * 64 * 2 * 16 * 4
    assert plain.stats.acceptance_length == 1.0
    assert plain.stats.accepted_histogram == [NEW - 1]
    assert plain.stats.draft_cache_bytes == 0


def test_a_window_bounds_the_draft_cache_and_native_does_not(model: wmtp.Model) -> None:
    def draft_bytes(**options: Any) -> int:
        running = wmtp.stream(model, [7] * 20, max_new_tokens=1, **SMALL | options)
        next(running)
        return running.generation().stats.draft_cache_bytes

    entry = 2 * 2 * 16 * 4
    assert draft_bytes(gamma=3) == (2 + 16 + 2) * entry
    assert draft_bytes(gamma=3, window=0, sink=0) == 64 * entry


def test_progress_counts_the_prompt_to_its_end(model: wmtp.Model) -> None:
    seen: list[tuple[int, int]] = []
    wmtp.generate(model, [7] * 45, max_new_tokens=1, on_progress=lambda *step: seen.append(step), **PLAIN)
    assert seen == [(32, 45), (45, 45)]


def test_text_goes_on_from_a_prompt_that_ends_within_a_character(model: wmtp.Model) -> None:
    half = model.encode("é")[:1] if len(model.encode("é")) > 1 else model.encode("語")[:1]
    assert model.decode(half) == "\ufffd"
    out = wmtp.generate(model, [*model.encode(PROMPT), *half], max_new_tokens=12, **PLAIN)
    assert out.text[0] == model.decode([*half, *out.tokens[0]])


def test_without_a_tokenizer_there_are_tokens_and_no_text(model: wmtp.Model, plain: wmtp.Generation) -> None:
    bare = dataclasses.replace(model, tokenizer=None)
    out = wmtp.generate(bare, model.encode(PROMPT), max_new_tokens=NEW, **PLAIN)
    assert (out.tokens, out.text) == (plain.tokens, [""])


@pytest.mark.slow
def test_a_prompt_of_100_000_tokens_costs_a_constant_draft_cache(tmp_path: Path) -> None:
    length, new = 100_000, 24
    model = wmtp.load(write_tiny(tmp_path / "long", max_positions=2**17, heads=1), dtype="float32")
    prompt = np.random.default_rng(0).integers(3, VOCAB, length)
    seen: list[int] = []
    options = dict(max_new_tokens=new, ignore_eos=True, chunk=2048, page_size=1024)
    out = wmtp.generate(model, prompt, window=512, sink=4, on_progress=lambda done, total: seen.append(done), **options)
    assert len(out.tokens[0]) == new
    assert seen[-1] == length
    assert len(seen) == -(-length // 2048)
    assert out.stats.draft_cache_bytes == (4 + 512 + 2) * 2 * 16 * 4
    assert length <= out.stats.target_cache_bytes / (2 * 16 * 4) <= 1.25 * (length + new + 1024)
