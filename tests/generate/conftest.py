"""One tiny model for all tests of a worker, and a way to compute nothing twice."""

from pathlib import Path

import pytest

import wmtp_jax as wmtp
from tests.generate.tiny import write_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model(folder: Path) -> wmtp.Model:
    """The tiny model."""
    return wmtp.load(folder, dtype="float32")
