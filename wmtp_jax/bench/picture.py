"""What all pictures of benchmark results share."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from wmtp_jax.errors import UserError

_DOTS_AN_INCH = 120


def require_plot(path: Path) -> None:
    """Raises UserError, before anything is measured, where no picture could be written to ``path``."""
    if path.suffix.lower() != ".png":
        raise UserError(f"--plot {path}: must end in .png")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--plot {path}: cannot be written")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib, which the extra `plot` has (pip install 'wmtp-jax[plot]')")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches that needs no screen."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Writes a PNG. Raises UserError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=_DOTS_AN_INCH, format="png")
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written ({error.strerror})") from None
