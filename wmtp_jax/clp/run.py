"""One head-training run from end to end: sequences, hidden states, heads, length predictor, one file."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wmtp_jax.bench.texts import read_texts
from wmtp_jax.clp.config import HeadsConfig, Kind, fingerprint
from wmtp_jax.clp.data import Sequences, collect, distilled_sequences, frequent_tokens, text_sequences
from wmtp_jax.clp.store import HEADS_NAME, draft_vocabulary, save_heads
from wmtp_jax.clp.train import HeadTraining, initial_heads, train_heads
from wmtp_jax.errors import UserError
from wmtp_jax.model import Model
from wmtp_jax.models.decoder import Decoder

# Sequences that the backbone reads or answers at once.
_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class HeadRun:
    """What to train, on what.

    - ``text``: a file as ``read_texts`` takes; None is the packaged held-out text. Its documents are learned as they
      are, or with ``distill`` asked as prompts, whose answers the backbone writes itself.
    - ``tokens``: at most so many of the text, or with ``distill`` as many prompts as fill so many.
    - ``length``: of a training sequence; an answer has at least half of it.
    """

    kind: Kind = "recurrent"
    k: int = 2
    competing: bool = False
    draft_vocab: int = 0
    text: Path | None = None
    distill: bool = False
    temperature: float = 0.0
    tokens: int = 500_000
    length: int = 256
    training: HeadTraining = field(default_factory=HeadTraining)

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("length", 16)):
            if getattr(self, name) < least:
                raise UserError(f"{name}={getattr(self, name)}: must be {least} or more")


def run_heads(model: Model, options: HeadRun, out: Path, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Trains in ``out``, resuming what is there, and writes ``out/heads.safetensors``. Returns the last figures."""
    backbone = model.decoder
    config = heads_config(backbone, options)

    def note(line: str) -> None:
        report({"note": line})

    collected = collect(
        backbone, _data_folder(out, config, options), lambda: _sequences(model, options, note), _ROWS, note
    )
    ids = frequent_tokens(collected.sequences, config.draft_vocab, config.vocab_size)
    vocabulary = draft_vocabulary(backbone, ids)
    last: dict[str, Any] = {"tokens": int(collected.sequences.counted.sum()), "sequences": len(collected)}

    def keep(row: dict[str, Any]) -> None:
        last.update({name: value for name, value in row.items() if name not in ("step", "seconds", "note")})
        report(row)

    heads = initial_heads(config, backbone, options.training.seed)
    folder = out / f"{config.kind}-{config.k}{'-competing' if config.competing else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    heads = train_heads(backbone, heads, vocabulary, collected, options.training, folder, keep)
    path = folder / HEADS_NAME
    metadata = {"seed": str(options.training.seed), "data": "distilled" if options.distill else "text"}
    save_heads(heads, ids, path, metadata)
    return {"heads": str(path), **last}


def heads_config(backbone: Decoder, options: HeadRun) -> HeadsConfig:
    """The heads' description. Raises UserError for heads that this backbone cannot have."""
    if options.kind == "own" and backbone.mtp is None:
        raise UserError("kind=own: this checkpoint has no MTP head; train recurrent heads instead")
    if options.kind == "recurrent" and backbone.mtp is not None:
        raise UserError(
            "kind=recurrent: this checkpoint has an MTP head already; use kind=own, or load it with --no-mtp"
        )
    vocab = backbone.config.vocab_size
    return HeadsConfig(
        kind=options.kind,
        k=options.k,
        hidden_size=backbone.config.hidden_size,
        vocab_size=vocab,
        fingerprint=fingerprint(backbone),
        draft_vocab=0 if options.draft_vocab >= vocab else options.draft_vocab,
        competing=options.competing,
    )


def _data_folder(out: Path, config: HeadsConfig, options: HeadRun) -> Path:
    """Heads of every kind share the states of one backbone on one text."""
    source = "demo" if options.text is None else options.text.name
    way = f"distilled-{options.temperature}" if options.distill else "text"
    return out / "data" / f"{config.fingerprint}-{source}-{way}-{options.tokens}-{options.length}"


def _sequences(model: Model, options: HeadRun, note: Callable[[str], None]) -> Sequences:
    texts = read_texts(options.text)
    if not options.distill:
        return text_sequences(model, texts, options.length, options.tokens)
    order = np.random.default_rng(options.training.seed).permutation(len(texts))
    prompts = [texts[index] for index in order[: max(1, options.tokens // options.length)]]
    return distilled_sequences(
        model,
        prompts,
        options.length,
        temperature=options.temperature,
        rows=_ROWS,
        seed=options.training.seed,
        note=note,
    )
