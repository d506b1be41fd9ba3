"""Text that arrives token by token is the text of all tokens, and never half a character."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.generate.tiny import SPECIAL, TEXT, VOCAB, tiny_tokenizer
from wmtp_jax.text.detokenizer import REPLACEMENT, Detokenizer
from wmtp_jax.text.tokenizer import decode, encode, special_ids

TOKENIZER = tiny_tokenizer()
ordinary_ids = st.integers(len(SPECIAL), VOCAB - 1)
unicode_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[REPLACEMENT]), max_size=20)


def read(ids: Sequence[int]) -> str:
    return decode(TOKENIZER, ids)


@given(st.lists(ordinary_ids, max_size=60))
def test_pieces_of_any_bytes_join_to_the_text_of_all_tokens(ids: list[int]) -> None:
    detokenizer, whole, shown = Detokenizer(read), read(ids), ""
    for token in ids:
        shown += detokenizer.push(token)
        assert whole.startswith(shown)
    assert shown + detokenizer.finish() == whole


@given(unicode_text)
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    detokenizer, shown = Detokenizer(read), ""
    for count, token in enumerate(ids := encode(TOKENIZER, text, add_special_tokens=False), 1):
        shown += detokenizer.push(token)
        assert shown == read(ids[:count]).rstrip(REPLACEMENT)
    assert shown == text
    assert detokenizer.finish() == ""


@given(unicode_text, st.data())
def test_a_prompt_cut_anywhere_is_continued_without_a_gap(text: str, data: st.DataObject) -> None:
    ids = encode(TOKENIZER, text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(read, ids[:cut])
    shown = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.finish()
    begun = read(ids[:cut]).rstrip(REPLACEMENT)
    assert begun + shown == text


def test_a_long_text_is_decoded_a_few_tokens_at_a_time() -> None:
    longest = 0

    def watched(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return read(ids)

    detokenizer = Detokenizer(watched)
    ids = encode(TOKENIZER, TEXT * 20, add_special_tokens=False)
    assert "".join(map(detokenizer.push, ids)) == TEXT * 20
    assert longest < 20 < len(ids)


def test_words_keep_the_space_that_a_decoder_strips_from_the_first() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    tokenizer.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(lambda ids: decode(tokenizer, ids), prompt=[0])
    assert [detokenizer.push(token) for token in (1, 2, 0)] == [" two", " three", " one"]


def test_special_tokens_are_silent() -> None:
    ids = encode(TOKENIZER, "a<|im_end|>b", add_special_tokens=False)
    assert len(ids) == 3
    assert read(ids) == "ab"
    assert special_ids(TOKENIZER) == {0, 1, 2}
