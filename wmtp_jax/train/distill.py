"""The backbone's own answers to prompts: what it will write is what its heads should learn to foresee."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from wmtp_jax.engine.engine import Engine
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.errors import UserError
from wmtp_jax.model import Model
from wmtp_jax.train.head_data import Sequences

Note = Callable[[str], None]
_CHUNK = 64
# Lines of progress, and of answers that an interruption can cost.
_NOTED = 64


def distilled_sequences(
    model: Model,
    prompts: Sequence[str],
    length: int,
    *,
    temperature: float,
    rows: int,
    seed: int,
    note: Note,
    kept: Path | None = None,
) -> Sequences:
    """Prompts with their answers, ``length`` tokens at most, of which only the answers are counted.

    Prompts are asked by the chat template where there is one. Those that leave less than half of ``length`` for an
    answer are left out. ``rows`` are answered at the same time. Each answer is appended to the file ``kept`` as it is
    there, and found there by a later run that was given the same.
    """
    encoded = [ids for ids in (encode_prompt(model, prompt) for prompt in prompts) if 0 < len(ids) <= length // 2]
    if not encoded:
        raise UserError(f"no prompt is short enough: {length // 2} tokens at most, half of a sequence")
    answers = _read(kept)
    if answers:
        note(f"{len(answers)} answers were there already")
    missing = [index for index in range(len(encoded)) if index not in answers]
    if missing:
        answers |= _answer(model, encoded, missing, length, temperature, rows, seed, note, kept)
    tokens = np.zeros((len(encoded), length), np.int32)
    counted = np.zeros((len(encoded), length), bool)
    for index, prompt in enumerate(encoded):
        whole = [*prompt, *answers[index]]
        tokens[index, : len(whole)] = whole
        counted[index, len(prompt) : len(whole)] = True
    return Sequences(tokens, counted)


def encode_prompt(model: Model, prompt: str) -> list[int]:
    """Asks by the chat template where the checkpoint has one."""
    if model.chat_template is None:
        return model.encode(prompt)
    return model.encode_chat([{"role": "user", "content": prompt}])


def _answer(
    model: Model,
    encoded: Sequence[list[int]],
    missing: Sequence[int],
    length: int,
    temperature: float,
    rows: int,
    seed: int,
    note: Note,
    kept: Path | None,
) -> dict[int, list[int]]:
    options = EngineOptions(
        rows=min(rows, len(missing)),
        context=length + 1,
        page_size=-(-(length + 1) // _CHUNK) * _CHUNK,
        chunk=_CHUNK,
        gamma=0,
        window=0,
        steps=8,
        prefix_bytes=0,
        queue=len(missing),
    )
    answers: dict[int, list[int]] = {}
    with Engine(model, options, warm_up=False) as engine:
        running = {
            index: engine.submit(
                encoded[index],
                max_new_tokens=length - len(encoded[index]),
                temperature=temperature,
                seed=(seed + index) % 2**32,
            )
            for index in missing
        }
        for count, (index, one) in enumerate(running.items(), 1):
            for _ in one:
                pass
            answers[index] = one.tokens
            if count % _NOTED == 0 or count == len(missing):
                _append(kept, answers, list(running)[(count - 1) // _NOTED * _NOTED : count])
                note(f"{count} of {len(missing)} prompts answered")
    return answers


def _read(kept: Path | None) -> dict[int, list[int]]:
    """Answers of an earlier run; a last line that was cut short is none."""
    found: dict[int, list[int]] = {}
    if kept is not None and kept.is_file():
        for line in kept.read_text(encoding="utf-8").splitlines():
            try:
                index, tokens = json.loads(line)
                found[int(index)] = [int(token) for token in tokens]
            except (ValueError, TypeError):
                continue
    return found


def _append(kept: Path | None, answers: dict[int, list[int]], new: Sequence[int]) -> None:
    if kept is None:
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a", encoding="utf-8") as file:
        # A line that an interruption cut short ends here.
        file.write("\n" if file.tell() else "")
        file.write("\n".join(json.dumps([index, answers[index]]) for index in new))
