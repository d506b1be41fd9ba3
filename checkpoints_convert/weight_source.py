"""What a conversion needs to know of the place where weights come from."""

from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from checkpoints_convert.quantized import Quantized
from checkpoints_convert.tensor_files import TensorInfo


class WeightSource(Protocol):
    """Named tensors, readable row by row, and what goes with them. Use as a context manager, so that files are closed.

    In ``tensors`` a quantized weight has the shape of its values and its format for a dtype. Of one that cannot be
    decoded, ``quantized`` says why. ``companions`` maps tensors that are read only for another one to that one.
    ``damaged_scales`` fills while weights are read: by weight, what is wrong with each damaged scale.
    """

    # What ``wmtp inspect`` calls it.
    format: ClassVar[str]
    # What messages call it.
    path: Path
    # The model in the words of a Hugging Face config.json.
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    quantized: dict[str, Quantized]
    companions: dict[str, str]
    damaged_scales: dict[str, dict[str, str]]

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows ``start`` to ``stop`` along the first axis, in a floating dtype."""
        ...

    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a text, apart from those in ``config``."""
        ...

    def write_companions(self, out: Path) -> list[str]:
        """Writes the config, the tokenizer and whatever else goes with the weights; returns warnings."""
        ...
