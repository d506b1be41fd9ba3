"""Orbax or trained parameters back out: a Hugging Face folder in bfloat16, in the layout of the model's family."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from checkpoints_convert.families import FAMILIES
from checkpoints_convert.families.table import Family
from checkpoints_convert.layouts import ConvKernel, Layout, Same, Transposed
from wmtp_jax.checkpoint import stacked_blocks
from wmtp_jax.config import ConfigError, ModelConfig
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import named_parameters

_BLOCK = re.compile(r"^blocks\.(\d+)\.(.*)$")


def export_hf(config: ModelConfig, model: Decoder, folder: Path, *, metadata: dict[str, str]) -> None:
    """Writes config.json, generation_config.json and model.safetensors (bfloat16; decay parameters float32).

    Raises ConfigError where no config.json would give ``config`` when it is read back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family, hf = exported_family(config)
    parameters = named_parameters(model)
    tensors = {}
    for entry in family.table(config, ()):
        value = _stored(np.asarray(_parameter(parameters, config, entry.parameter), np.float32), entry.layout)
        keep = entry.parameter.endswith(("A_log", "dt_bias", ".D"))
        tensors[entry.sources[0]] = np.ascontiguousarray(value if keep else value.astype(ml_dtypes.bfloat16))
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt", **metadata})
    weights.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
    generation = {"eos_token_id": list(config.eos_ids), "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def exported_family(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The family whose config.json can hold ``config``, and that config.json. Raises ConfigError if there is none."""
    for family in FAMILIES:
        hf = family.describe(config) if family.describe else None
        if hf is not None and _unfolded(family.parse_config(hf)) == _unfolded(config):
            return family, hf
    names = " and ".join(family.name for family in FAMILIES if family.describe)
    raise ConfigError(f"no config.json of dense {names} models can describe this one: it has parts that they lack")


def _unfolded(config: ModelConfig) -> ModelConfig:
    """The same model as one period: one order of blocks can be cut into segments in several ways."""
    return replace(config, pattern=config.blocks, num_periods=1, more_segments=())


def _parameter(parameters: dict[str, Any], config: ModelConfig, name: str) -> Any:
    """One parameter by its unstacked name, in which blocks are counted through all periods."""
    match = _BLOCK.match(name)
    if match is None:
        return parameters[name]
    block, slot = int(match[1]), 0
    while block not in (stacked := stacked_blocks(config, slot)):
        slot += 1
    return parameters[f"blocks.{slot}.{match[2]}"][stacked.index(block)]


def _stored(value: np.ndarray, layout: Layout) -> np.ndarray:
    if isinstance(layout, Same):
        return value
    if isinstance(layout, Transposed):
        return value.T
    assert isinstance(layout, ConvKernel)
    return value.T[:, None, :]
