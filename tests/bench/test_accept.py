"""`wmtp bench accept` against the loop's own count of accepted drafts, step by step and prompt by prompt."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests.bench.folders import tiny, write_text
from wmtp_jax.bench.accept import ContextResult, Difference, _answered, _first_difference, measure, trained_context
from wmtp_jax.bench.options import AcceptOptions
from wmtp_jax.bench.tasks import TaskPrompt
from wmtp_jax.bench.texts import prompt_ends
from wmtp_jax.config import RopeConfig, RopeScaling
from wmtp_jax.decode.drafter import MTPDrafter
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.prefill import prefill, start_state
from wmtp_jax.decode.sampling import batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.errors import UserError
from wmtp_jax.models.parameters import pack

OPTIONS = AcceptOptions(
    windows=(5, 0), sinks=(2,), contexts=(9, 40), new_tokens=23, prompts=3, rows=2, temperature=0.9, seed=2**32 - 2
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt", 130)


@pytest.fixture(scope="module")
def results(text: Path) -> list[ContextResult]:
    return measure(tiny(), OPTIONS, text, 20, lambda line: None)


def accepted_in_a_row_alone(prompt: list[int], seed: int, drafter: MTPDrafter, new_tokens: int) -> list[int]:
    """The loop's histogram of one prompt, read after every step that begins with fewer than ``new_tokens`` tokens."""
    decoder, stops = tiny().decoder, jnp.full((1, 1), -1)
    sampling = batch_sampling([SamplingParams(temperature=0.9, seed=seed)])
    state = start_state(
        decoder, drafter, [prompt], [new_tokens + 50], page_size=256, dtype=jnp.float32, penalized=False
    )
    state = prefill(decoder, drafter, state, [prompt], sampling, stops, chunk=256)
    packed, accepted, emitted = pack(decoder), [], 1
    while emitted < new_tokens:
        state, out = decode(packed, drafter, state, sampling, stops, 1)
        accepted.append(int(np.argmax(out.accepted)))
        emitted += int(out.count[0])
    return accepted


def test_histograms_are_those_of_the_loop_run_prompt_by_prompt(text: Path, results: list[ContextResult]) -> None:
    ids = tiny().encode(text.read_text())
    ends = prompt_ends([len(ids)], 40, 3)
    assert len(ends) == 3
    for result in results:
        for drafter in result.drafters:
            made = MTPDrafter(gamma=3, window=drafter.window, sink=drafter.sink)
            steps = []
            for (_, end), seed in zip(ends, (2**32 - 2, 2**32 - 1, 0), strict=True):
                steps += accepted_in_a_row_alone(ids[end - result.context : end], seed, made, OPTIONS.new_tokens)
            assert drafter.histogram == [steps.count(n) for n in range(4)], (result.context, drafter.window)
            assert drafter.acceptance_length.value == pytest.approx(np.mean(steps) + 1)
            reached = [sum(step >= j for step in steps) for j in range(4)]
            rates = [reached[j + 1] / reached[j] for j in range(3) if reached[j]]
            assert [rate.value for rate in drafter.acceptance][: len(rates)] == pytest.approx(rates)
    # Or the comparison above would hold of drafts that are always wrong.
    assert any(sum(drafter.histogram[1:]) > 3 for result in results for drafter in result.drafters)


def test_native_comes_first_and_windows_are_compared_with_it(results: list[ContextResult]) -> None:
    for result in results:
        native, small = result.drafters
        assert (native.window, small.window) == (0, 5)
        assert (native.sink, small.sink) == (0, 2)
        assert native.length_minus_native is None
        assert small.length_minus_native is not None
        assert small.length_minus_native.value == pytest.approx(
            small.acceptance_length.value - native.acceptance_length.value
        )
        assert small.draft_cache_bytes_per_row == 2 * 2 * 10 * 4 * (5 + 2 + 3 - 1)


def test_every_drafter_gives_the_text_of_plain_decoding(results: list[ContextResult]) -> None:
    assert all(result.same_text for result in results)
    assert [result.beyond_trained for result in results] == [False, True]
    assert not any(result.beyond_positions for result in results)
    assert all(0 <= result.repeated <= 1 for result in results)


def test_a_different_text_is_reported_where_it_differs() -> None:
    assert _first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert _first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == Difference(1, 1)


def test_the_batch_size_changes_no_count(text: Path, results: list[ContextResult]) -> None:
    options = dataclasses.replace(OPTIONS, contexts=(40,), windows=(5,), rows=1)
    (alone,) = measure(tiny(), options, text, 100, lambda line: None)
    assert alone.drafters[0].histogram == results[1].drafters[1].histogram
    assert alone.repeated == results[1].repeated
    assert alone.drafters[0].length_minus_native is None


def test_more_prompts_compile_nothing_more(text: Path) -> None:
    few = dataclasses.replace(OPTIONS, contexts=(33,), prompts=2)
    measure(tiny(), few, text, 100, lambda line: None)
    compiled = decode._cache_size()
    lines: list[str] = []
    (result,) = measure(tiny(), dataclasses.replace(few, prompts=7), text, 100, lines.append)
    assert result.prompts == 7
    assert decode._cache_size() == compiled
    batches = [f"prompts {i} to {min(i + 1, 7)} of 7" for i in (1, 3, 5, 7)]
    assert lines == [f"continuation, context 33: {line}" for line in ["decoding in 3 ways", *batches]]


def test_a_context_beyond_the_models_positions_is_measured_and_said(text: Path, results: list[ContextResult]) -> None:
    # 40 tokens and 23 new ones with room for two runs of drafts.
    for limit, beyond in ((69, False), (68, True)):
        model = dataclasses.replace(tiny(), config=dataclasses.replace(tiny().config, max_positions=limit))
        (found,) = measure(model, dataclasses.replace(OPTIONS, contexts=(40,)), text, 20, lambda line: None)
        assert found.beyond_positions == beyond
        assert [d.histogram for d in found.drafters] == [d.histogram for d in results[1].drafters]


def test_answers_are_looked_for_in_the_new_text() -> None:
    prompts = [TaskPrompt([1], ("ab", "cd")), TaskPrompt([1], ("cd", "x"))]
    texts = [tiny().encode("a b cd"), tiny().encode("xcd")]
    assert _answered(tiny(), prompts, texts) == 3 / 4
    assert _answered(tiny(), [TaskPrompt([1], ())], texts[:1]) is None


def test_documents_that_are_all_too_short_are_continued_as_one(tmp_path: Path) -> None:
    path, lines = tmp_path / "texts.jsonl", list[str]()
    path.write_text("".join(f'{{"text": "{letter * 25}"}}\n' for letter in "ab"))
    options = dataclasses.replace(OPTIONS, contexts=(40,), prompts=2)
    (result,) = measure(tiny(), options, path, 100, lines.append)
    assert result.prompts == 2
    assert lines[0] == "no document has 40 tokens: continuing all of them as one text"


def test_a_model_or_text_too_short_or_without_a_draft_head_is_refused(text: Path) -> None:
    def refused(match: str, **changes: object) -> None:
        with pytest.raises(UserError, match=match):
            measure(model, dataclasses.replace(OPTIONS, **changes), text, 100, lambda line: None)

    model = tiny()
    refused("longest document has 130 tokens, and a context needs 131", contexts=(9, 131))
    refused("the text has 0 different words", tasks=("continuation", "needles"))
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, mtp_pattern=()))
    refused("no MTP head")


def test_the_trained_context_is_the_one_before_stretching() -> None:
    config = tiny().config
    assert trained_context(config) == 32768
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_positions=8192)
    rope = RopeConfig(theta=1e4, rotary_dim=6, scaling=scaling)
    stretched = dataclasses.replace(config, attention=dataclasses.replace(config.attention, rope=rope))
    assert trained_context(stretched) == 8192
