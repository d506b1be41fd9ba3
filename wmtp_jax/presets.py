"""Presets: TOML files that describe a model, and how to train it or measure it."""

import json
import tomllib
from pathlib import Path
from typing import Any

from wmtp_jax.config import ModelConfig, config_from_json
from wmtp_jax.errors import UserError

_PACKAGE = Path(__file__).parent
# In an installed package the presets lie inside it, in a checkout beside it.
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def preset_names() -> list[str]:
    """Names that ``read_preset`` knows."""
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.toml")})


def read_preset(name: str) -> dict[str, Any]:
    """A preset by name, or a TOML file by path. Raises UserError for neither and for malformed TOML."""
    candidates = [Path(name), *(folder / f"{name}.toml" for folder in _FOLDERS)]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise UserError(f"{name or repr(name)}: no such preset or file; presets are {', '.join(preset_names())}")
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a TOML file ({error})") from None


def model_config(preset: dict[str, Any], name: str) -> ModelConfig:
    """The ``[model]`` section of a preset. Raises UserError where it has none, or none that can be built."""
    if "model" not in preset:
        raise UserError(f"{name}: has no [model] section")
    try:
        text = json.dumps({"mtp_pattern": [], "eos_ids": [], **preset["model"]})
    except TypeError as error:
        raise UserError(f"{name}: [model] section: {error}") from None
    return config_from_json(text)
