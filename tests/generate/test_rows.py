"""A row's text and tokens do not depend on how many tokens come at once, and end where they should."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wmtp_jax as wmtp
from tests.generate.tiny import EOS, SPECIAL, VOCAB
from wmtp_jax.generation.rows import Row

# Few different tokens, so that stop strings of a few characters occur; two of them are halves of one character.
ALPHABET = [68, 69, 70, 71, 268, 290, 167, 172]
few_ids = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=30)


def in_pieces(row: Row, tokens: list[int], cuts: Sequence[int]) -> tuple[str, list[int]]:
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    events = [row.take(tokens[a:b]) for a, b in pairwise(edges)]
    return "".join(event.text for event in events), [token for event in events for token in event.tokens]


@given(ids=few_ids, cuts=st.lists(st.integers(0, 30), max_size=6), data=st.data())
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(
    model: wmtp.Model, ids: list[int], cuts: list[int], data: st.DataObject
) -> None:
    whole = model.decode(ids)
    begin = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[begin : begin + data.draw(st.integers(1, 4))]
    options = wmtp.GenerateOptions(max_new_tokens=len(ids), stop=stop)
    row = Row(0, [], model, options)
    text, tokens = in_pieces(row, ids, cuts)
    if "\ufffd" in stop:
        assert stop not in text
        return
    completed = next(k for k in range(1, len(ids) + 1) if stop in model.decode(ids[:k]))
    assert text == row.text == whole[: whole.index(stop)]
    assert tokens == row.tokens == ids[:completed]
    assert row.finished == "stop string"


@given(ids=few_ids, cuts=st.lists(st.integers(0, 30), max_size=6), limit=st.integers(1, 30))
def test_a_limit_ends_the_tokens_exactly(model: wmtp.Model, ids: list[int], cuts: list[int], limit: int) -> None:
    row = Row(0, [], model, wmtp.GenerateOptions(max_new_tokens=limit))
    text, tokens = in_pieces(row, ids, cuts)
    assert tokens == ids[:limit]
    if len(ids) >= limit:
        assert row.finished == "length"
        assert text == model.decode(ids[:limit])
    else:
        assert row.finished is None


@pytest.mark.parametrize("eos", [EOS, 268])
def test_an_end_of_text_token_is_among_the_tokens_and_not_in_the_text(model: wmtp.Model, eos: int) -> None:
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=(eos,)))
    row = Row(0, [], ending, wmtp.GenerateOptions())
    event = row.take([70, 71, eos, 72, 73])
    assert event.tokens == [70, 71, eos]
    assert event.text == model.decode([70, 71])
    assert event.finished == "stop"
    ignoring = Row(0, [], ending, wmtp.GenerateOptions(ignore_eos=True))
    assert ignoring.take([70, eos, 72]).text == model.decode([70, eos, 72])
    assert ignoring.finished is None


def test_an_unfinished_character_ends_as_a_replacement_and_can_complete_a_stop_string(model: wmtp.Model) -> None:
    halves = next(
        ids
        for ids in ([a, b] for a in range(len(SPECIAL), VOCAB) for b in range(len(SPECIAL), VOCAB))
        if model.decode(ids[:1]) == "\ufffd" and model.decode(ids) not in ("", "\ufffd") and len(model.decode(ids)) == 1
    )
    row = Row(0, [], model, wmtp.GenerateOptions(max_new_tokens=2))
    assert [row.take([68]).text, row.take(halves[:1]).text] == [model.decode([68]), "\ufffd"]
    row = Row(0, [], model, wmtp.GenerateOptions(max_new_tokens=3))
    assert [row.take([token]).text for token in [68, *halves]] == [model.decode([68]), "", model.decode(halves)]
    row = Row(0, [], model, wmtp.GenerateOptions(max_new_tokens=2, stop="\ufffd"))
    assert row.take([68, halves[0]]).text == model.decode([68])
    assert row.finished == "stop string"
