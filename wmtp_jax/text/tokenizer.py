"""A checkpoint's tokenizer, with errors for people."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from wmtp_jax.errors import UserError

TOKENIZER_NAME = "tokenizer.json"


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder, or None where there is none. Raises UserError for a damaged file."""
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise UserError(f"{path}: not a tokenizer that can be read ({error})") from None


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids. ``add_special_tokens`` is for bare text: a chat template writes its own.

    Raises UserError for text that is not valid Unicode, as an undecodable command line argument gives.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not valid Unicode at character {error.start}: give it as UTF-8") from None
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text without special tokens; bytes that are no whole character become U+FFFD."""
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that ``decode`` leaves out."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
