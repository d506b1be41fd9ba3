"""Opens whatever a model's name means: a Hugging Face folder or a GGUF file."""

from pathlib import Path

from checkpoints_convert.hub import gguf_file, local_folder
from checkpoints_convert.weight_folder import WeightFolder
from checkpoints_convert.weight_source import WeightSource
from wmtp_jax.errors import UserError


def local_path(source: str | Path) -> Path:
    """The GGUF file that ``source`` is or alone holds, else the folder that it names, downloaded if it is a hub id.

    Raises UserError where there is neither.
    """
    path = Path(source)
    found = gguf_file(path)
    if found is not None:
        return found
    if path.suffix == ".gguf" and not path.exists():
        raise UserError(f"{path}: no such file")
    return local_folder(source)


def open_source(path: Path) -> WeightSource:
    """Opens what ``local_path`` gave. Raises UserError for a folder or file that is damaged."""
    if path.is_dir():
        return WeightFolder(path)
    # Imported late: folders do without the gguf library.
    from checkpoints_convert.gguf_file import GgufFile

    return GgufFile(path)
