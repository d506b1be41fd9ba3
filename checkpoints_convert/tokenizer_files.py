"""What travels along with the weights: tokenizer, chat template, generation config; and all end-of-text ids."""

import shutil
from pathlib import Path
from typing import Any

from checkpoints_convert.tensor_files import read_json
from wmtp_jax.text.chat import token_text

GENERATION_NAME = "generation_config.json"
_TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_COMPANIONS = (
    *_TOKENIZER_NAMES,
    "config.json",
    GENERATION_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
)


def copy_companions(source: Path, out: Path) -> list[str]:
    """Copies every file that goes with the weights; returns warnings about what is absent."""
    names = [name for name in _COMPANIONS if (source / name).is_file()]
    names += sorted(path.name for path in source.glob("*.jinja"))
    for name in names:
        shutil.copyfile(source / name, out / name)
    if not any(name in names for name in _TOKENIZER_NAMES):
        return [f"{source} holds no tokenizer: the model takes token ids only"]
    return []


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Every id that ends a text, config.json's apart: generation_config.json's and the tokenizer's eos_token.

    Chat models end their turns with a token that config.json often does not name.
    """
    ids: list[Any] = []
    generation = folder / GENERATION_NAME
    if generation.is_file():
        value = read_json(generation).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    ids.append(_tokenizer_eos(folder))
    return tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool))


def _tokenizer_eos(folder: Path) -> int | None:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    eos = token_text(config.get("eos_token"))
    added = config.get("added_tokens_decoder")
    if isinstance(added, dict):
        found = next((i for i, token in added.items() if token_text(token) == eos), None)
        if found is not None and found.isdecimal():
            return int(found)
    tokenizer = folder / "tokenizer.json"
    listed = read_json(tokenizer).get("added_tokens") if tokenizer.is_file() and eos is not None else None
    return next((token.get("id") for token in listed or [] if token_text(token) == eos), None)
