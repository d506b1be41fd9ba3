"""One head-training run from end to end: sequences, hidden states, heads, length predictor, one file."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wmtp_jax.clp.config import HeadsConfig, Kind, fingerprint
from wmtp_jax.clp.store import HEADS_NAME, draft_vocabulary, save_heads
from wmtp_jax.errors import UserError
from wmtp_jax.model import Model
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.option_checks import require
from wmtp_jax.text.documents import read_texts
from wmtp_jax.train.distill import distilled_sequences
from wmtp_jax.train.head_data import Sequences, collect, frequent_tokens, text_sequences
from wmtp_jax.train.head_trainer import HeadTraining, initial_heads, train_heads

# Sequences that the backbone reads at once, and prompts that it answers at the same time.
_ROWS = 16
_ANSWERED_ROWS = 64
_RUN = "run.json"


@dataclass(frozen=True, kw_only=True)
class HeadRun:
    """What to train, on what.

    - ``kind``: None is ``own`` where the checkpoint has an MTP head, else ``recurrent``.
    - ``text``: a file as ``read_texts`` takes; None is the packaged held-out text. Its documents are learned as they
      are, or with ``distill`` asked as prompts, whose answers the backbone writes itself.
    - ``tokens``: at most so many of the text, or with ``distill`` as many prompts as fill so many.
    - ``length``: of a training sequence; an answer has at least half of it.
    """

    kind: Kind | None = None
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
        require("length", self.length, 16)
        require("tokens", self.tokens, self.length)
        if self.temperature and not self.distill:
            raise UserError(f"--temperature {self.temperature:g} is of the backbone's answers: give --distill too")


def run_heads(model: Model, options: HeadRun, out: Path, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Trains in ``out``, or resumes, and writes ``out/KIND-K/heads.safetensors``. Returns the last figures."""
    backbone = model.decoder
    config = heads_config(backbone, options)

    def note(line: str) -> None:
        report({"note": line})

    data = out / "data" / _data_key(model, config, options)
    collected = collect(
        backbone, data, lambda: _sequences(model, options, data.with_suffix(".answers.jsonl"), note), _ROWS, note
    )
    ids = frequent_tokens(collected.sequences, config.draft_vocab, config.vocab_size)
    vocabulary = draft_vocabulary(backbone, ids)
    folder = out / f"{config.kind}-{config.k}{'-competing' if config.competing else ''}"
    _claim(folder, {"heads": config.to_json(), "data": data.name, "training": repr(options.training)})
    last: dict[str, Any] = {"tokens": int(collected.sequences.counted.sum()), "sequences": len(collected)}

    def keep(row: dict[str, Any]) -> None:
        last.update({name: value for name, value in row.items() if name not in ("step", "seconds", "note")})
        report(row)

    heads = initial_heads(config, backbone, options.training.seed)
    heads = train_heads(backbone, heads, vocabulary, collected, options.training, folder, keep)
    path = folder / HEADS_NAME
    metadata = {"seed": str(options.training.seed), "data": "distilled" if options.distill else "text"}
    save_heads(heads, ids, path, metadata)
    return {"heads": str(path), **last}


def heads_config(backbone: Decoder, options: HeadRun) -> HeadsConfig:
    """The heads' description. Raises UserError for heads that this backbone cannot have."""
    kind: Kind = options.kind or ("recurrent" if backbone.mtp is None else "own")
    if kind == "own" and backbone.mtp is None:
        raise UserError("kind=own: this checkpoint has no MTP head; train recurrent heads instead")
    if kind == "recurrent" and backbone.mtp is not None:
        raise UserError(
            "kind=recurrent: this checkpoint has an MTP head already; use kind=own, or load it with --no-mtp"
        )
    vocab = backbone.config.vocab_size
    return HeadsConfig(
        kind=kind,
        k=options.k,
        hidden_size=backbone.config.hidden_size,
        vocab_size=vocab,
        fingerprint=fingerprint(backbone),
        draft_vocab=0 if options.draft_vocab >= vocab else options.draft_vocab,
        competing=options.competing,
    )


def _data_key(model: Model, config: HeadsConfig, options: HeadRun) -> str:
    """Heads of every kind share the states of one backbone on one text: this names all that those depend on."""
    text = "demo" if options.text is None else hashlib.sha256(options.text.read_bytes()).hexdigest()[:12]
    way = f"distilled-{options.temperature}-{options.training.seed}" if options.distill else "text"
    dtype = model.decoder.embedding.dtype
    return f"{config.fingerprint}-{dtype}-{text}-{way}-{options.tokens}-{options.length}"


def _claim(folder: Path, run: dict[str, str]) -> None:
    """Marks the folder as this run's. Raises UserError where it holds another, which must not be taken up."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _RUN
    if not path.is_file():
        path.write_text(json.dumps(run, indent=1) + "\n")
    found = json.loads(path.read_text())
    for name in run:
        if found.get(name) != run[name]:
            raise UserError(f"{folder}: holds a run with other {name}; give another --out, or remove that folder")


def _sequences(model: Model, options: HeadRun, kept: Path, note: Callable[[str], None]) -> Sequences:
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
        rows=_ANSWERED_ROWS,
        seed=options.training.seed,
        note=note,
        kept=kept,
    )
