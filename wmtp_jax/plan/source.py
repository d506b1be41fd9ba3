"""Where a model's sizes come from: a preset, or the description that a model folder carries."""

from pathlib import Path

from wmtp_jax.config import ModelConfig
from wmtp_jax.errors import UserError
from wmtp_jax.plan.sizes import ModelSizes, sizes_of_config
from wmtp_jax.presets import model_config, preset_names, read_preset


def read_sizes(name: str) -> ModelSizes:
    """The sizes of a preset (by name, or a TOML file), of a converted folder or of a Hugging Face folder.

    No weight is read, and of a Hugging Face folder config.json is enough. Raises UserError for anything else.
    """
    if not name:
        raise UserError(f"--model: is empty; give a model folder or one of {', '.join(preset_names())}")
    if name not in preset_names() and Path(name).is_dir():
        return sizes_of_config(_folder_config(Path(name)))
    return sizes_of_config(model_config(read_preset(name), name))


def _folder_config(folder: Path) -> ModelConfig:
    # The converter builds on this package, and loads JAX, which presets do without.
    from checkpoints_convert.families import find_family
    from checkpoints_convert.families.table import MTP_PREFIX
    from checkpoints_convert.tensor_files import TensorFolder, read_json
    from wmtp_jax.checkpoint import MODEL_NAME, read_model_config

    if (folder / MODEL_NAME).is_file():
        return read_model_config(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: holds neither {MODEL_NAME} nor config.json, so it is no model folder")
    hf = read_json(folder / "config.json")
    family = find_family(hf)
    if not any(folder.glob("*.safetensors")):
        return family.parse_config(hf)
    with TensorFolder(folder) as files:
        return family.parse_config(hf, mtp_in_files=any(name.startswith(MTP_PREFIX) for name in files.tensors))
