"""Documents and prompts from files: JSON lines with a text each, or one plain text. Loads no JAX."""

import gzip
import json
import zlib
from pathlib import Path
from typing import NamedTuple

from wmtp_jax.errors import UserError
from wmtp_jax.folders import DEMO_FOLDER

DEMO_HELD_OUT = DEMO_FOLDER / "held_out.jsonl.gz"


class Prompt(NamedTuple):
    """A text to answer or to go on with; ``kind`` says of what sort, "" where the file does not."""

    kind: str
    text: str


def read_texts(path: Path | None) -> list[str]:
    """The documents of a file: JSON lines with a ``text`` each (``.jsonl``, ``.jsonl.gz``), or one plain UTF-8 text.

    None is the text that ships with the demo model, which it was not trained on. Raises UserError for a file that is
    none of these.
    """
    return [prompt.text for prompt in read_prompts(path)]


def read_prompts(path: Path | None) -> list[Prompt]:
    """The same documents with the ``kind`` that JSON lines may give beside the text. Raises UserError as above."""
    if path is None:
        if not DEMO_HELD_OUT.is_file():
            raise UserError("this installation has no held-out text: give a file")
        path = DEMO_HELD_OUT
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        prompts = _json_lines(text) if ".jsonl" in path.suffixes else [Prompt("", text)]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: neither UTF-8 text nor JSON lines with a text each ({error})") from None
    if not any(prompt.text for prompt in prompts):
        raise UserError(f"{path}: holds no text")
    return prompts


def _json_lines(lines: str) -> list[Prompt]:
    rows = [json.loads(line) for line in lines.split("\n") if line.strip()]
    prompts = [Prompt(row.get("kind", "") if isinstance(row, dict) else "", row["text"]) for row in rows]
    if not all(isinstance(part, str) for prompt in prompts for part in prompt):
        raise ValueError("a text or kind is not a string")
    return prompts
