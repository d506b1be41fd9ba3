"""A tiny model whose drafts are right now and then, as a Hugging Face folder that our code and transformers read."""

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoints_convert.export import export_hf
from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.model import Model

NAME = "hybrid"
VOCAB = CONFIGS[NAME].vocab_size
# A token a character, most of them letters.
ALPHABET = "".join(chr(ord("a") + i) for i in range(26)) + "0123456789 .,;:!?"


@cache
def tiny(seed: int = 8) -> Model:
    """The model with its tokenizer."""
    return Model(decoder=tiny_model(NAME, seed), config=CONFIGS[NAME], tokenizer=tokenizer())


def tokenizer() -> Tokenizer:
    """Each character of ``ALPHABET`` is the token of its index; others vanish."""
    assert len(ALPHABET) == VOCAB
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    return made


def write_folder(folder: Path) -> Path:
    """The same model on disk, its weights rounded to bfloat16."""
    export_hf(CONFIGS[NAME], tiny().decoder, folder, metadata={})
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def write_words(path: Path) -> Path:
    """Plain text of 80 different words."""
    path.write_text(" ".join(f"{a}{b}{c}e" for a in "bdfgk" for b in "aiou" for c in "lmns"))
    return path


def write_text(path: Path, length: int) -> Path:
    """Plain text of so many characters without a period."""
    path.write_text("".join(ALPHABET[(i * i * i + 5 * i) % 37] for i in range(length)))
    return path
