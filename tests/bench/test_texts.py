"""Held-out text: packing, and the places where prompts end."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmtp_jax.bench.options import AcceptOptions
from wmtp_jax.bench.prompts import beginning, beginning_as_text
from wmtp_jax.bench.texts import excerpt, prompt_ends
from wmtp_jax.errors import UserError
from wmtp_jax.text.documents import DEMO_HELD_OUT, read_texts
from wmtp_jax.text.tokenizer import encode, load_tokenizer

LENGTHS = {"short": 30, "long": 900, "middle": 400, "longer": 1200}


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    lines = [
        json.dumps(dict(source="s", title=title, text=(f"{title} é\u2028— " * length)[:length]), ensure_ascii=False)
        for title, length in LENGTHS.items()
    ]
    path = tmp_path / "held_out.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def test_the_excerpt_is_the_longest_documents_whole(held_out: Path, tmp_path: Path) -> None:
    out = tmp_path / "held_out.jsonl.gz"
    assert excerpt(held_out, out, documents=3) == ["longer", "long", "middle"]
    rows = {row["title"]: row for row in map(json.loads, held_out.read_text().strip().split("\n"))}
    packed = [json.loads(line) for line in gzip.decompress(out.read_bytes()).decode().strip().split("\n")]
    assert packed == [rows["longer"], rows["long"], rows["middle"]]
    assert read_texts(out) == [row["text"] for row in packed]


def test_the_excerpt_has_the_same_bytes_every_time_and_keeps_to_its_limit(held_out: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    excerpt(held_out, first)
    excerpt(held_out, second)
    assert first.read_bytes() == second.read_bytes()
    limit = len(first.read_bytes()) - 1
    assert len(excerpt(held_out, second, limit_bytes=limit)) < len(LENGTHS)
    assert len(second.read_bytes()) <= limit
    with pytest.raises(UserError, match="no document fits into 10 bytes"):
        excerpt(held_out, second, limit_bytes=10)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 150), st.integers(1, 12))
def test_prompts_end_at_different_places_with_room_before_them(lengths: list[int], longest: int, count: int) -> None:
    if max(lengths) < longest:
        with pytest.raises(UserError, match=f"has {max(lengths)} tokens, and a context needs {longest}"):
            prompt_ends(lengths, longest, count)
        return
    ends = prompt_ends(lengths, longest, count)
    able = [document for document, length in enumerate(lengths) if length >= longest]
    assert 1 <= len(ends) <= count
    assert len(set(ends)) == len(ends)
    assert all(longest <= end <= lengths[document] for document, end in ends)
    assert ends[: len(able)] == [(document, longest) for document in able][:count]
    # A document with little room gives fewer; where all have enough, none is missing.
    rounds = -(-count // len(able))
    assert len(ends) == count or min(lengths[document] for document in able) - longest < rounds


def test_a_beginning_comes_from_the_first_document_that_is_long_enough(held_out: Path, folder: Path) -> None:
    def encode(text: str) -> list[int]:
        return [ord(character) for character in text]

    documents = read_texts(held_out)
    assert beginning(encode, held_out, 500) == encode(documents[1])[:500]
    assert beginning(encode, held_out, 30) == encode(documents[0])
    with pytest.raises(UserError, match="1200 tokens, and a context needs 1201"):
        beginning(encode, held_out, 1201)
    assert beginning_as_text(folder, held_out, 20) == ("short  short  short ", 20)


@pytest.mark.skipif(not DEMO_HELD_OUT.is_file(), reason="this checkout has no demo model")
def test_the_packaged_text_holds_every_default_prompt() -> None:
    tokenizer = load_tokenizer(DEMO_HELD_OUT.parent)
    assert tokenizer is not None
    options = AcceptOptions()
    lengths = [len(encode(tokenizer, text, add_special_tokens=True)) for text in read_texts(None)]
    assert len(prompt_ends(lengths, max(options.contexts), options.prompts)) == options.prompts
    assert DEMO_HELD_OUT.stat().st_size <= 400_000
