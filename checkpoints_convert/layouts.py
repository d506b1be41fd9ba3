"""How a stored tensor becomes a parameter: one small class a layout, each able to work on a slice at a time.

Hugging Face projections are [out, in]; ours are [in, out]. A layout reads rows of its sources (their first axis) and
returns the matching slice of the parameter along ``axis``, so that no layout ever needs a whole large tensor.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from checkpoints_convert.weight_source import WeightSource

Shape = tuple[int, ...]


class Layout(Protocol):
    """One mapping between stored tensors and a parameter."""

    # The parameter's axis that may be read slice by slice; None where it is read whole.
    axis: ClassVar[int | None]

    def source_shapes(self, shape: Shape, sources: tuple[str, ...]) -> list[Shape]:
        """The shapes that ``sources`` must have for a parameter of ``shape``."""
        ...

    def read(self, files: WeightSource, sources: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        """The parameter's slice ``start`` to ``stop`` along ``axis`` in the stored dtype."""
        ...


@dataclass(frozen=True)
class Same:
    """Stored as it is used: norms, biases, the embedding, per-head scalars."""

    axis: ClassVar[int | None] = 0

    def source_shapes(self, shape: Shape, sources: tuple[str, ...]) -> list[Shape]:
        return [shape]

    def read(self, files: WeightSource, sources: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        return files.read(sources[0], start, stop)


@dataclass(frozen=True)
class Transposed:
    """A projection: [out, in] to [in, out]."""

    axis: ClassVar[int | None] = 1

    def source_shapes(self, shape: Shape, sources: tuple[str, ...]) -> list[Shape]:
        return [shape[::-1]]

    def read(self, files: WeightSource, sources: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        return files.read(sources[0], start, stop).T


@dataclass(frozen=True)
class ConvKernel:
    """A depthwise convolution: [channels, 1, kernel] to [kernel, channels]."""

    axis: ClassVar[int | None] = 1

    def source_shapes(self, shape: Shape, sources: tuple[str, ...]) -> list[Shape]:
        return [(shape[1], 1, shape[0])]

    def read(self, files: WeightSource, sources: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        return files.read(sources[0], start, stop)[:, 0, :].T


@dataclass(frozen=True)
class PackedExperts:
    """All experts in one tensor: [E, out, in] to [E, in, out]."""

    axis: ClassVar[int | None] = 0

    def source_shapes(self, shape: Shape, sources: tuple[str, ...]) -> list[Shape]:
        return [(shape[0], shape[2], shape[1])]

    def read(self, files: WeightSource, sources: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        return files.read(sources[0], start, stop).swapaxes(1, 2)


@dataclass(frozen=True)
class ExpertList:
    """One tensor an expert and projection; sources run expert by expert, projections (gate, up) inside."""

    projections: int
    axis: ClassVar[int | None] = 0

    def source_shapes(self, shape: Shape, sources: tuple[str, ...]) -> list[Shape]:
        return [(shape[2] // self.projections, shape[1])] * len(sources)

    def read(self, files: WeightSource, sources: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        mine = sources[start * self.projections : stop * self.projections]
        stacked = np.stack([files.read(name) for name in mine])
        experts = stacked.reshape(stop - start, -1, stacked.shape[-1])
        return experts.swapaxes(1, 2)


@dataclass(frozen=True)
class KeyHeadGroups:
    """Part of Qwen3-Next's fused projection, whose rows are grouped by key head.

    Each of the ``groups`` key heads holds ``widths`` rows side by side (for instance query, key, its values, its
    output gates). The parts named by ``parts`` are gathered over the groups, then laid one after another.
    """

    groups: int
    widths: tuple[int, ...]
    parts: tuple[int, ...]
    axis: ClassVar[int | None] = None

    def source_shapes(self, shape: Shape, sources: tuple[str, ...]) -> list[Shape]:
        return [(self.groups * sum(self.widths), shape[0])]

    def read(self, files: WeightSource, sources: tuple[str, ...], start: int, stop: int) -> np.ndarray:
        rows = files.read(sources[0])
        grouped = rows.reshape(self.groups, sum(self.widths), -1)
        ends = np.cumsum(self.widths)
        chosen = [grouped[:, ends[p] - self.widths[p] : ends[p]].reshape(-1, rows.shape[1]) for p in self.parts]
        return np.concatenate(chosen).T
