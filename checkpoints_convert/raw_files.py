"""Plain reads at known offsets.

A mapped file counts towards resident memory and kills the process with SIGBUS when it shrinks under it; these do
neither.
"""

import os
from pathlib import Path

import numpy as np

from wmtp_jax.errors import UserError


class RawFiles:
    """Files that are opened when they are first read."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def close(self) -> None:
        """Closes what was opened; a later read opens it again."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read_into(self, path: Path, offset: int, out: np.ndarray, name: str) -> None:
        """Fills ``out``, which is contiguous. Raises UserError where the file ends before the tensor ``name`` does."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = os.open(path, os.O_RDONLY)
        view = out.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(view):
            count = os.preadv(file, [view[done:]], offset + done)
            if count == 0:
                raise UserError(f"{path}: ends inside tensor {name}; the file changed or is truncated")
            done += count
