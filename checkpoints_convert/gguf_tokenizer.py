"""The tokenizer and chat template that a GGUF file carries, as the files that a Hugging Face folder has them in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from checkpoints_convert.gguf_config import Metadata
from wmtp_jax.text.tokenizer import TOKENIZER_NAME

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class _Unknown(Exception):
    """Why no tokenizer can be made of what the file holds."""


def write_tokenizer(metadata: Metadata, out: Path) -> list[str]:
    """Writes tokenizer.json and tokenizer_config.json; returns a warning where there is no tokenizer to write."""
    warnings = []
    try:
        tokenizer = _tokenizer(metadata)
        (out / TOKENIZER_NAME).write_text(tokenizer.to_str(), encoding="utf-8")
    except _Unknown as reason:
        warnings.append(f"{metadata.path}: {reason}; no {TOKENIZER_NAME} is written: the model takes token ids only")
    text = json.dumps(_settings(metadata), indent=1, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return warnings


def _settings(metadata: Metadata) -> dict[str, Any]:
    """What tokenizer_config.json holds: special tokens by name, and the chat template."""
    stored = metadata.get("tokenizer.ggml.tokens", [])
    tokens = stored if isinstance(stored, list) else []
    ids = {name: metadata.token(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    settings: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    template = metadata.get("tokenizer.chat_template")
    return settings | ({"chat_template": template} if isinstance(template, str) else {})


def _tokenizer(metadata: Metadata) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model", "none")
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise _Unknown("it holds no tokenizer" if kind == "none" else f"its tokenizer {kind!r} is not known here")
    tokens = _list(metadata, "tokens", str)
    try:
        tokenizer = make(metadata, tokens)
        _add_tokens(tokenizer, tokens, _list(metadata, "token_type", int, optional=True))
    except _Unknown:
        raise
    except Exception as error:
        raise _Unknown(f"its tokenizer cannot be made ({error})") from None
    # Both kinds begin with the token unless the file says otherwise, as llama.cpp has it.
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3
    _surround(tokenizer, metadata, tokens, bos=begins)
    return tokenizer


def _list(metadata: Metadata, key: str, kind: type, *, optional: bool = False) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise _Unknown(f"tokenizer.ggml.{key} is not a list of {kind.__name__}")
    if not values and not optional:
        raise _Unknown(f"tokenizer.ggml.{key} is missing")
    return values


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _byte_level(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE; ``tokenizer.ggml.pre`` names the way in which text is split first."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise _Unknown(f"the pre-tokenizer {name!r} is not known here")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _list(metadata, "merges", str))]
    tokenizer = Tokenizer(BPE(_ids(tokens), merges, ignore_merges=name in _LLAMA3))
    split(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split_smollm(tokenizer: Tokenizer) -> None:
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def _split_llama3(tokenizer: Tokenizer) -> None:
    _split_by(tokenizer, _LLAMA3_SPLIT)


def _split_qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    _split_by(tokenizer, _QWEN2_SPLIT)


def _split_by(tokenizer: Tokenizer, pattern: str) -> None:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_SPLITS: dict[str, Callable[[Tokenizer], None]] = {
    "default": _split_gpt2,
    "gpt-2": _split_gpt2,
    "smollm": _split_smollm,
    "qwen2": _split_qwen2,
    **dict.fromkeys(_LLAMA3, _split_llama3),
}


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE: the file keeps a score for each token instead of merges."""
    ids = _ids(tokens)
    scores = _list(metadata, "scores", float)
    merges = _merges(ids, dict(zip(tokens, scores, strict=True)))
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer = Tokenizer(BPE(ids, merges, fuse_unk=True, byte_fallback=True))
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(ids: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two, best score first; among equals, the longest parts first."""
    found: list[tuple[float, str, str]] = []
    for token, score in scores.items():
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in parts if pair[0] in ids and pair[1] in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, *pair) for pair in known]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are matched whole and left out of decoded text; user-defined ones are matched whole."""
    listed = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if token]
    special = [
        AddedToken(token, normalized=False, special=True) for token, kind in listed if kind in (_CONTROL, _UNKNOWN)
    ]
    plain = [AddedToken(token, normalized=False, special=False) for token, kind in listed if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _surround(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str], *, bos: bool) -> None:
    """Puts the tokens that begin and end a text around it, where the file says so."""
    wanted = {
        "bos": metadata.flag("tokenizer.ggml.add_bos_token", bos),
        "eos": metadata.flag("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: metadata.token(f"tokenizer.ggml.{name}_token_id") for name, asked in wanted.items() if asked}
    around = {name: (tokens[i], i) for name, i in ids.items() if i is not None and i < len(tokens)}
    if around:
        first, last = (around[name][0] if name in around else None for name in ("bos", "eos"))
        template = [token for token in (first, "$A", last) if token is not None]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B:1"], special_tokens=list(around.values())
        )
