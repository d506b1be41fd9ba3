"""Held-out text: how it is packed, and cut into prompts. Loads no JAX."""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from wmtp_jax.errors import UserError

_LIMIT_BYTES = 400_000


def excerpt(held_out: Path, out: Path, *, documents: int = 6, limit_bytes: int = _LIMIT_BYTES) -> list[str]:
    """Packs the longest documents of a JSON-lines file for shipping, as JSON lines in gzip; returns their titles.

    Each line has ``source``, ``title`` and ``text``. As many as ``documents`` are kept, fewer where they would exceed
    ``limit_bytes`` packed; the bytes depend on nothing but the input.
    """
    # Not `splitlines`, which would also split at separators within a text.
    lines = [line for line in held_out.read_bytes().decode("utf-8").split("\n") if line]
    kept = sorted(lines, key=lambda line: -len(json.loads(line)["text"]))[:documents]
    while kept and len(_packed(kept)) > limit_bytes:
        kept.pop()
    if not kept:
        raise UserError(f"{held_out}: no document fits into {limit_bytes} bytes")
    out.write_bytes(_packed(kept))
    return [json.loads(line)["title"] for line in kept]


def _packed(lines: Sequence[str]) -> bytes:
    return gzip.compress("".join(f"{line}\n" for line in lines).encode(), 9, mtime=0)


def long_documents(documents: list[list[int]], longest: int) -> list[list[int]]:
    """The documents' tokens as they are, or, where none has ``longest`` of them, all as one."""
    if any(len(ids) >= longest for ids in documents):
        return documents
    return [list(itertools.chain.from_iterable(documents))]


def prompt_ends(lengths: Sequence[int], longest: int, count: int) -> list[tuple[int, int]]:
    """Up to ``count`` places (document, end) with at least ``longest`` tokens before them, spread over the documents.

    The first of a document is at ``longest``: its prompt is the document's beginning. Raises UserError where no
    document is that long.
    """
    able = [document for document, length in enumerate(lengths) if length >= longest]
    if not able:
        raise UserError(
            f"the text's longest document has {max(lengths)} tokens, and a context needs {longest}: "
            "give shorter contexts or a longer text"
        )
    rounds = -(-count // len(able))
    ends = [
        (document, longest + (lengths[document] - longest) * turn // rounds)
        for turn in range(rounds)
        for document in able
    ]
    return list(dict.fromkeys(ends))[:count]
