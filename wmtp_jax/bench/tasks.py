"""Long prompts of an exact length whose end asks about what came before: the task families of RULER.

The families are those of RULER (arXiv 2404.06654): needles, frequent and common words, variable tracking; in words of
our own, over held-out text. ``continuation`` is the text itself. Loads no JAX.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from wmtp_jax.bench.options import TASKS
from wmtp_jax.errors import UserError

Encode = Callable[[str], list[int]]

# One needle for so many tokens of the prompt, and how many of them the question asks for.
_TOKENS_A_NEEDLE = 256
_ASKED_NEEDLES = 4
# RULER's exponent of the words' frequencies, and how many of the most frequent it asks for.
_ZIPF_EXPONENT = 2.0
_CODED_WORDS = 500
_ASKED_FREQUENT = 3
# RULER repeats its ten common words ten times as often as the others.
_COMMON_WORDS = 10
_COMMON_WEIGHT = 10
_TOKENS_A_LISTED_WORD = 6
_USES_OF_A_RARE_WORD = 4
# RULER's chains: one value handed on four times.
_HOPS = 4
_TOKENS_A_CHAIN = 2048
_WORD = re.compile(r"\b[a-z]{4,9}\b")


class TaskPrompt(NamedTuple):
    """A prompt's token ids, and what a model that solves the task writes next, in any order; none where it is free."""

    ids: list[int]
    answers: tuple[str, ...]


class Haystack(NamedTuple):
    """The held-out text as one run of tokens, the words in it, and the tokenizer without its special tokens."""

    tokens: Sequence[int]
    words: Sequence[str]
    encode: Encode

    def filler(self, start: int, count: int) -> list[int]:
        """``count`` tokens from ``start`` on; after its end the text begins again."""
        return np.take(self.tokens, np.arange(start, start + count), mode="wrap").tolist()


def haystack(texts: Sequence[str], encode: Encode) -> Haystack:
    """Joins documents. Raises UserError where they have too few words to ask about."""
    words = sorted(set(_WORD.findall("\n".join(texts))))
    if len(words) < 2 * _COMMON_WORDS:
        raise UserError(f"the text has {len(words)} different words, too few to make tasks of: give a longer text")
    return Haystack(list(itertools.chain.from_iterable(map(encode, texts))), words, encode)


def task_prompt(task: str, text: Haystack, context: int, prompt: int, prompts: int, seed: int) -> TaskPrompt:
    """Prompt number ``prompt`` of ``prompts``, of exactly ``context`` tokens; the same arguments give the same one.

    Raises UserError where so few tokens cannot hold the task.
    """
    rng = np.random.default_rng([seed, TASKS.index(task), prompt])
    return _MAKERS[task](text, context, len(text.tokens) * prompt // prompts, rng)


def _needles(text: Haystack, context: int, start: int, rng: np.random.Generator) -> TaskPrompt:
    count = min(max(_ASKED_NEEDLES, context // _TOKENS_A_NEEDLE), len(text.words))
    keys = rng.permutation(np.array(text.words))[:count].tolist()
    values = [f"{value:07d}" for value in rng.choice(9_000_000, count, replace=False) + 1_000_000]
    lines = [f"\nThe secret number of {key} is {value}.\n" for key, value in zip(keys, values, strict=True)]
    wanted = rng.choice(count, _ASKED_NEEDLES, replace=False)
    asked = ", ".join(keys[i] for i in wanted)
    head = "Some secret numbers are hidden in the following text. Remember them.\n"
    tail = f"\nQuestion: What are the secret numbers of {asked}?\nAnswer: The secret numbers of {asked} are"
    return TaskPrompt(_hidden(text, context, start, rng, head, lines, tail), tuple(values[i] for i in wanted))


def _variables(text: Haystack, context: int, start: int, rng: np.random.Generator) -> TaskPrompt:
    chains = 1 + context // _TOKENS_A_CHAIN
    names = [name.upper() for name in _coded_words(rng, 5, chains * (_HOPS + 1))]
    values = rng.choice(90_000, chains, replace=False) + 10_000
    lines = []
    step = [0] * chains
    # Chains interleave, each in its own order.
    for chain in rng.permutation(np.repeat(np.arange(chains), _HOPS + 1)):
        own = names[chain * (_HOPS + 1) :]
        source = f"VAR {own[step[chain] - 1]}" if step[chain] else values[chain]
        lines.append(f"\nVAR {own[step[chain]]} = {source}\n")
        step[chain] += 1
    head = "Follow the assignments of variables that are hidden in the following text.\n"
    tail = (
        f"\nQuestion: Which variables have the value {values[0]}?\n"
        f"Answer: By the assignments above, {_HOPS + 1} variables have the value {values[0]}:"
    )
    return TaskPrompt(_hidden(text, context, start, rng, head, lines, tail), tuple(names[: _HOPS + 1]))


def _frequent(text: Haystack, context: int, start: int, rng: np.random.Generator) -> TaskPrompt:
    words = np.array(_coded_words(rng, 6, _CODED_WORDS))
    weights = np.arange(1, _CODED_WORDS + 1) ** -_ZIPF_EXPONENT
    head = "Keep count of the words in the following coded text.\n"
    tail = (
        f"\nQuestion: What are the {_ASKED_FREQUENT} most frequent words of the coded text?\n"
        f"Answer: The {_ASKED_FREQUENT} most frequent words of the coded text are"
    )
    drawn = _draws(words, weights, rng)
    return _counted(text, context, start, head, ((word, f" {word}") for word in drawn), tail, _ASKED_FREQUENT)


def _common(text: Haystack, context: int, start: int, rng: np.random.Generator) -> TaskPrompt:
    rare = max(_COMMON_WORDS, context // _TOKENS_A_LISTED_WORD // _USES_OF_A_RARE_WORD)
    words = rng.permutation(np.array(text.words))[: _COMMON_WORDS + rare]
    weights = np.where(np.arange(len(words)) < _COMMON_WORDS, _COMMON_WEIGHT, 1)
    head = "Keep count of the words in the following list.\n"
    tail = (
        f"\nQuestion: What are the {_COMMON_WORDS} most common words of the list?\n"
        f"Answer: The {_COMMON_WORDS} most common words of the list are"
    )
    listed = ((word, f"\n{i}. {word}") for i, word in enumerate(_draws(words, weights, rng), 1))
    return _counted(text, context, start, head, listed, tail, _COMMON_WORDS)


_MAKERS = {"needles": _needles, "frequent": _frequent, "common": _common, "variables": _variables}


def _coded_words(rng: np.random.Generator, letters: int, count: int) -> list[str]:
    """Different words of random letters."""
    digits = np.array(np.unravel_index(rng.choice(26**letters, count, replace=False), (26,) * letters)).T
    return ["".join(chr(ord("a") + digit) for digit in word) for word in digits]


def _draws(words: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> Iterator[str]:
    while True:
        yield from rng.choice(words, 4096, p=weights / weights.sum()).tolist()


def _hidden(
    text: Haystack,
    context: int,
    start: int,
    rng: np.random.Generator,
    head: str,
    lines: Sequence[str],
    tail: str,
) -> list[int]:
    """The lines in their order at random places of the filler."""
    hidden = [text.encode(line) for line in lines]
    first, last = text.encode(head), text.encode(tail)
    room = _room(context, len(first) + sum(map(len, hidden)) + len(last))
    filler = text.filler(start, room)
    body, at = [], 0
    for place, line in zip(np.sort(rng.integers(0, room + 1, len(hidden))).tolist(), hidden, strict=True):
        body += filler[at:place] + line
        at = place
    return first + body + filler[at:] + last


def _counted(
    text: Haystack, context: int, start: int, head: str, items: Iterable[tuple[str, str]], tail: str, asked: int
) -> TaskPrompt:
    """As many (word, how it is written) as fit, and a little filler before them; asks for the most frequent words."""
    first, last = text.encode(head), text.encode(tail)
    room = _room(context, len(first) + len(last))
    counts, body = Counter[str](), list[int]()
    for word, written in items:
        ids = text.encode(written)
        if len(body) + len(ids) > room:
            break
        counts[word] += 1
        body += ids
    ids = first + text.filler(start, room - len(body)) + body + last
    return TaskPrompt(ids, tuple(word for word, _ in counts.most_common(asked)))


def _room(context: int, taken: int) -> int:
    if taken > context:
        raise UserError(f"--contexts {context}: this task takes {taken} tokens without any text: give longer contexts")
    return context - taken
