"""Stop strings cut at the same character however the text is split, and nothing after the cut is ever shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wmtp_jax.text.stops import StopStrings

few_letters = st.text("ab\n", min_size=1, max_size=4)


def cut_by_reading_each_character(text: str, stops: list[str]) -> str | None:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


@given(st.lists(st.text("ab\n", max_size=5), max_size=12), st.lists(few_letters, max_size=3))
def test_the_first_stop_string_cuts_and_only_its_possible_beginnings_wait(pieces: list[str], stops: list[str]) -> None:
    stop_strings, seen, shown = StopStrings(stops), "", ""
    cut = cut_by_reading_each_character("".join(pieces), stops)
    for piece in pieces:
        seen += piece
        shown += stop_strings.push(piece)
        expected = cut_by_reading_each_character(seen, stops)
        assert stop_strings.found == (expected is not None)
        if expected is None:
            assert seen.startswith(shown)
            waiting = seen[len(shown) :]
            assert not waiting or any(stop.startswith(waiting) and stop != waiting for stop in stops)
        else:
            assert shown == expected
    assert shown + stop_strings.finish() == ("".join(pieces) if cut is None else cut)


@pytest.mark.parametrize("stops", [["END"], ["END", "D"], ["xEN", "END"], ["END", "ENDING"]])
def test_one_piece_or_many_make_no_difference(stops: list[str]) -> None:
    text = "some xEEND of ENDING"
    whole, split = StopStrings(stops), StopStrings(stops)
    assert whole.push(text) == "".join(map(split.push, text)) == cut_by_reading_each_character(text, stops)
