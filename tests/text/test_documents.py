"""Documents and prompts from files."""

import gzip
from pathlib import Path

import pytest

from wmtp_jax.errors import UserError
from wmtp_jax.text import documents
from wmtp_jax.text.documents import Prompt, read_prompts, read_texts


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "play.txt"
    path.write_text("First line\n\nöther\n", encoding="utf-8")
    assert read_texts(path) == ["First line\n\nöther\n"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"\xff\xfe"),
        ("a.txt", b""),
        ("a.jsonl", b'{"title": "no text"}\n'),
        ("a.jsonl", b'{"text": 3}\n'),
        ("a.jsonl", b'{"text": "a", "kind": 3}\n'),
        ("a.jsonl", b'["text"]\n'),
        ("a.jsonl", b"not json\n"),
        ("a.jsonl", b"\n"),
        ("a.jsonl.gz", b"not gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "cut"}\n', mtime=0)[:-9]),
    ],
    ids=[
        "not UTF-8",
        "empty",
        "no text key",
        "text a number",
        "kind a number",
        "no object",
        "no JSON",
        "blank line",
        "no gzip",
        "cut",
    ],
)
def test_a_file_that_is_no_text_gives_one_line_with_its_name(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{name}: (neither|holds no text)"):
        read_texts(path)


def test_without_a_packaged_text_a_file_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(documents, "DEMO_HELD_OUT", tmp_path / "none.jsonl.gz")
    with pytest.raises(UserError, match="no held-out text: give a file"):
        read_texts(None)


def test_prompts_have_the_kind_that_their_line_gives(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a", "kind": "chat"}\n\n{"text": "b"}\n')
    assert read_prompts(path) == [Prompt("chat", "a"), Prompt("", "b")]
