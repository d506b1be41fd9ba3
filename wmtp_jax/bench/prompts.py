"""Prompts of a given length from a text, and which folder transformers can read."""

from collections.abc import Callable
from pathlib import Path

from wmtp_jax.bench.texts import prompt_ends
from wmtp_jax.errors import UserError
from wmtp_jax.folders import model_folder
from wmtp_jax.text.documents import read_texts

# What reading more text than this for one prompt would only cost time: the most characters a token is likely to have.
_CHARACTERS_A_TOKEN = 16


def hugging_face_folder(model: str) -> Path:
    """A model's folder, where transformers can read it. Raises UserError for a converted folder."""
    from wmtp_jax.checkpoint import MODEL_NAME

    folder = model_folder(model)
    if (folder / MODEL_NAME).is_file():
        raise UserError(f"{folder}: a converted folder, which transformers cannot read; give the Hugging Face folder")
    return folder


def beginning(encode: Callable[[str], list[int]], text: Path | None, tokens: int) -> list[int]:
    """The first ``tokens`` token ids of the first document that has as many. Raises UserError where none has."""
    documents = [encode(document[: tokens * _CHARACTERS_A_TOKEN]) for document in read_texts(text)]
    document, end = prompt_ends([len(ids) for ids in documents], tokens, 1)[0]
    return documents[document][:end]


def beginning_as_text(folder: Path, text: Path | None, tokens: int) -> tuple[str, int]:
    """A prompt of about ``tokens`` tokens as text, and how many it has when it is read again.

    Loads the folder's tokenizer and no model. Raises UserError where there is none.
    """
    from wmtp_jax.text.tokenizer import TOKENIZER_NAME, decode, encode, load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UserError(f"{folder}: has no {TOKENIZER_NAME}, and `wmtp generate` reads text")

    def ids(text: str) -> list[int]:
        return encode(tokenizer, text, add_special_tokens=True)

    prompt = decode(tokenizer, beginning(ids, text, tokens))
    return prompt, len(ids(prompt))
