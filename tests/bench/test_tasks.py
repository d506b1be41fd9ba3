"""Generated long prompts: their exact length, and answers that reading the prompt again confirms."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmtp_jax.bench.options import CONTINUATION, TASKS
from wmtp_jax.bench.tasks import Haystack, TaskPrompt, haystack, task_prompt
from wmtp_jax.errors import UserError

GENERATED = [task for task in TASKS if task != CONTINUATION]
# Of letters that no number, name or sentence of a task is made of.
TEXTS = [" ".join(f"q{a}{b}z{c}" for c in "ghjk") for a in "bcdf" for b in "lmnprs"]


def encode(text: str) -> list[int]:
    """Two tokens a digit, one for anything else, so that lengths in tokens are not lengths in characters."""
    return [token for c in text for token in ([ord(c), 0] if c.isdigit() else [ord(c)])]


def written(prompt: TaskPrompt) -> str:
    return "".join(chr(token) for token in prompt.ids if token)


@pytest.fixture(scope="module")
def text() -> Haystack:
    return haystack(TEXTS, encode)


@pytest.mark.parametrize("task", GENERATED)
@given(context=st.integers(900, 9000), prompt=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
def test_a_prompt_has_exactly_as_many_tokens_and_ends_with_its_question(
    text: Haystack, task: str, context: int, prompt: int, seed: int
) -> None:
    made = task_prompt(task, text, context, prompt, 5, seed)
    assert len(made.ids) == context
    assert made == task_prompt(task, text, context, prompt, 5, seed)
    head, question = written(made).split("\nQuestion: ")
    assert head[0].isupper()
    assert re.fullmatch(r"What .*\?\nAnswer: .* are|Which .*\?\nAnswer: .*:", question)
    assert len(set(made.answers)) == len(made.answers) >= 3
    assert not any(answer in question for answer in made.answers)


@pytest.mark.parametrize("task", GENERATED)
def test_prompts_of_a_task_differ_from_each_other_and_from_seed_to_seed(text: Haystack, task: str) -> None:
    prompts = [tuple(task_prompt(task, text, 1500, i, 3, seed).ids) for i in range(3) for seed in (0, 1)]
    assert len(set(prompts)) == 6


def test_each_asked_needle_is_hidden_once_among_many(text: Haystack) -> None:
    made = task_prompt("needles", text, 9000, 1, 3, 7)
    body, question = written(made).split("\nQuestion: ")
    needles = re.findall(r"\nThe secret number of (\w+) is (\d{7})\.\n", body)
    assert len(needles) == len(dict(needles)) == 9000 // 256
    asked = re.findall(r"secret numbers of ([\w, ]+)\?", question)[0].split(", ")
    assert [dict(needles)[key] for key in asked] == list(made.answers)
    # Anywhere in the text, in any order.
    places = [body.index(value) for value in made.answers]
    assert max(places) - min(places) > 1000
    assert places != sorted(places)


def test_the_variables_that_are_asked_for_are_those_that_carry_the_value(text: Haystack) -> None:
    made = task_prompt("variables", text, 9000, 0, 3, 5)
    values: dict[str, str] = {}
    for name, source in re.findall(r"\nVAR ([A-Z]{5}) = (?:VAR )?(\w+)\n", written(made)):
        assert name not in values
        values[name] = source if source.isdigit() else values[source]
    assert len(values) == 5 * (1 + 9000 // 2048)
    asked = re.findall(r"have the value (\d+)\?", written(made))[0]
    assert sorted(made.answers) == sorted(name for name, value in values.items() if value == asked)


@pytest.mark.parametrize(
    ("task", "line", "asked"), [("frequent", r" ([a-z]{6})\b", 3), ("common", r"\n\d+\. (\w+)", 10)]
)
def test_the_words_that_are_asked_for_are_the_most_frequent(text: Haystack, task: str, line: str, asked: int) -> None:
    made = task_prompt(task, text, 30_000, 0, 3, 5)
    body = written(made).split("\nQuestion: ")[0].split("\n", 1)[1]
    counts = Counter(re.findall(line, body))
    assert len(made.answers) == asked
    least = min(counts[answer] for answer in made.answers)
    others = [count for word, count in counts.items() if word not in made.answers]
    assert least >= max(others) > 0
    assert np.mean([counts[answer] for answer in made.answers]) > 3 * np.mean(others)


def test_fillers_start_apart_and_go_round(text: Haystack) -> None:
    total = len(text.tokens)
    assert text.filler(total - 3, 5) == [*text.tokens[-3:], *text.tokens[:2]]
    bodies = [written(task_prompt("needles", text, 900, i, 3, 0)).split("\n")[1] for i in range(3)]
    whole = "".join(map(chr, text.tokens))
    assert all(body[:20] == whole[total * i // 3 :][:20] for i, body in enumerate(bodies))


@pytest.mark.parametrize("task", GENERATED)
def test_a_context_too_short_for_the_task_is_refused_with_its_size(text: Haystack, task: str) -> None:
    with pytest.raises(UserError, match=r"--contexts 40: this task takes \d+ tokens without any text"):
        task_prompt(task, text, 40, 0, 1, 0)


def test_a_text_without_words_is_refused() -> None:
    with pytest.raises(UserError, match="1 different words, too few"):
        haystack(["1 2 3 word word"], encode)
