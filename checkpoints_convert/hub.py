"""Model sources: a local folder, or a Hugging Face hub id that is downloaded into the hub's own cache."""

import re
from pathlib import Path

from wmtp_jax.checkpoint import MODEL_NAME
from wmtp_jax.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
_UNWANTED = ["*/*"]


def local_folder(source: str | Path) -> Path:
    """The folder that ``source`` names, downloaded first where it is a hub id and no local path.

    Raises UserError for a missing, empty or unreadable folder and for a download that fails.
    """
    if not str(source):
        raise UserError("the model's name is empty: give a folder or a hub id")
    folder = Path(source)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not folder.exists():
        return _download(source)
    require_folder(folder)
    return folder


def require_folder(folder: Path) -> None:
    """Raises UserError where ``folder`` is missing, a file, empty, or holds nothing but a GGUF file."""
    found = gguf_file(folder)
    if found is not None:
        raise UserError(f"{found}: is a GGUF file: convert it first with `wmtp convert {found} OUT`, and give OUT")
    if folder.is_file():
        raise UserError(f"{folder}: is a file, not a model folder")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    try:
        empty = not any(folder.iterdir())
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None
    if empty:
        raise UserError(f"{folder}: is empty")


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or alone holds beside no other weights."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    others = path.is_dir() and (any(path.glob("*.safetensors")) or (path / MODEL_NAME).is_file())
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not others else []
    return found[0] if len(found) == 1 else None


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError:
        raise UserError(f"{hub_id}: the hub wants you to accept its terms and log in (`hf auth login`)") from None
    except RepositoryNotFoundError:
        raise UserError(f"{hub_id}: neither a local folder nor a model on the hub") from None
    except LocalEntryNotFoundError:
        raise UserError(f"{hub_id}: no such local folder, and the hub cannot be reached to download it") from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{hub_id}: no such local folder, and the download failed: {reason}") from None
