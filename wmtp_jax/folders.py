"""Which folder a model's name means. Loads no JAX."""

from pathlib import Path

from wmtp_jax.errors import UserError

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo_model"


def model_folder(model: str | Path) -> Path:
    """The folder behind a path, a hub id (downloaded first) or ``"demo"``. Raises UserError where there is none."""
    if model == DEMO:
        if not DEMO_FOLDER.is_dir():
            raise UserError("this installation has no demo model: give a model folder")
        return DEMO_FOLDER
    # The converter builds on this package, so it can only be imported late.
    from checkpoints_convert.hub import local_folder

    return local_folder(model)
