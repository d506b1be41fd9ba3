"""What users can get wrong is said in one line that names it, before anything runs."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wmtp_jax as wmtp
from tests.generate.drafters import TextDrafter
from tests.generate.tiny import MAX_POSITIONS, VOCAB, write_tiny
from wmtp_jax.generation.prompts import encode_prompts


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "prompt 0 is empty"),
        ([], "no prompt"),
        (["a", ""], "prompt 1 is empty"),
        ([[5], []], "prompt 1 is empty"),
        (np.zeros((1, 0), np.int32), "prompt 0 is empty"),
        ([VOCAB], f"prompt 0: token id {VOCAB} at position 0 is not in 0 to {VOCAB - 1}"),
        ([[5], [6, -1]], "prompt 1: token id -1 at position 1"),
        ([4, 2.5], "prompt 0: 2.5 at position 1 is no token id"),
        (np.array([4.0, 2.0]), "prompt 0: .*4.0.* at position 0 is no token id"),
        ([4, True], "prompt 0: True at position 1 is no token id"),
        ([None, None], "prompt 0: None at position 0 is no token id"),
        ([[4], [None]], "prompt 1: None at position 0 is no token id"),
        ([4, "a"], "prompt 0 must be text or token ids, not int"),
        (["a", b"b"], "prompt 1 must be text or token ids, not bytes"),
        (b"bytes", "prompts must be text, token ids, or a list of either, not bytes"),
        (7, "not int"),
        ("caf\udce9", "not valid Unicode at character 3"),
        (
            [5] * (MAX_POSITIONS - 130),
            f"prompt 0: {MAX_POSITIONS - 130} tokens and 131 more .* max_positions={MAX_POSITIONS}",
        ),
    ],
)
def test_a_bad_prompt_is_named(model: wmtp.Model, prompts: Any, message: str) -> None:
    with pytest.raises(wmtp.UserError, match=message):
        wmtp.stream(model, prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(gamma=9), "gamma=9: must be a whole number, from 0 to 8"),
        (dict(gamma=-1), "gamma=-1"),
        (dict(gamma=1.0), "gamma=1.0"),
        (dict(drafter=TextDrafter(gamma=9, text=())), "gamma=9"),
        (dict(window=-1), "window=-1"),
        (dict(window=0, sink=4), "sink=4 needs a window"),
        (dict(window=8, sink=-4), "sink=-4"),
        (dict(max_new_tokens=-1), "max_new_tokens=-1"),
        (dict(max_new_tokens=MAX_POSITIONS), f"max_positions={MAX_POSITIONS}"),
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(top_k=2.5), "top_k=2.5"),
        (dict(temperature=1e30), r"temperature=1e\+30: must be from 0 to 1e\+06"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1e-44), "top_p=1e-44: must be from 1e-09 to 1"),
        (dict(repetition_penalty=1e-38), "repetition_penalty=1e-38: must be from 0.01 to 100"),
        (dict(presence_penalty=1e39), r"presence_penalty=1e\+39"),
        (dict(min_p=1.5), "min_p=1.5"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0"),
        (dict(presence_penalty=float("inf")), "presence_penalty=inf"),
        (dict(seed=-1), "seed=-1"),
        (dict(seed=2**32), "seed=4294967296"),
        (dict(seed=[1, 2]), "2 seeds for 1 prompts"),
        (dict(seed=[1.5]), "seed=1.5"),
        (dict(stop=["a", ""]), "stop string must be text"),
        (dict(stop=[7]), "stop string must be text"),
        (dict(chunk=0), "chunk=0"),
        (dict(page_size=0), "page_size=0"),
        (dict(steps_per_read=0), "steps_per_read=0"),
    ],
)
def test_a_bad_option_is_named(model: wmtp.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(wmtp.UserError, match=message):
        wmtp.stream(model, "fox", **options)


def test_every_way_to_give_the_same_prompts_is_understood(model: wmtp.Model) -> None:
    ids = model.encode("fox")
    assert len(ids) > 1
    for one in ("fox", ids, tuple(ids), np.array(ids), ["fox"], [ids], np.array([ids], np.uint16), [np.array(ids)]):
        assert encode_prompts(model, one, new_positions=0) == [ids]
    assert encode_prompts(model, ["fox", ids[:1]], new_positions=0) == [ids, ids[:1]]
    assert encode_prompts(model, "\x00\x1b[2J", new_positions=0)


def test_the_longest_prompt_that_fits_is_taken(model: wmtp.Model) -> None:
    room = MAX_POSITIONS - 16 - 3
    wmtp.stream(model, [5] * room, max_new_tokens=16)
    with pytest.raises(wmtp.UserError, match=f"{room + 1} tokens and 19 more"):
        wmtp.stream(model, [5] * (room + 1), max_new_tokens=16)


def test_seeds_count_up_from_one_or_are_given_one_a_row() -> None:
    rows = wmtp.GenerateOptions(seed=2**32 - 1).row_sampling(3)
    assert [row.seed for row in rows] == [2**32 - 1, 0, 1]
    assert [row.seed for row in wmtp.GenerateOptions(seed=[7, 7]).row_sampling(2)] == [7, 7]


def test_every_sampling_option_reaches_every_row() -> None:
    sampling = dict(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-0.2,
        frequency_penalty=0.3,
    )
    rows = wmtp.GenerateOptions(**sampling).row_sampling(2)
    assert [dataclasses.asdict(row) for row in rows] == [sampling | dict(seed=seed) for seed in (0, 1)]


def test_drafting_without_a_head_says_how_to_do_without(tmp_path: Path) -> None:
    headless = wmtp.load(write_tiny(tmp_path / "headless", mtp=False))
    with pytest.raises(wmtp.UserError, match=r"gamma=3: this checkpoint has no MTP head .* gamma=0"):
        wmtp.stream(headless, "fox")
    wmtp.stream(headless, "fox", gamma=0)


def test_without_a_tokenizer_only_text_is_refused(model: wmtp.Model) -> None:
    bare = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(wmtp.UserError, match=r"no tokenizer.json: give token ids"):
        wmtp.stream(bare, "fox")
    with pytest.raises(wmtp.UserError, match="stop strings need text"):
        wmtp.stream(bare, [5, 6], stop="x")
    wmtp.stream(bare, [5, 6])
