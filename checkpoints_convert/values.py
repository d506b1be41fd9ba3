"""Reads parameters slice by slice, casts them and checks that every value is finite."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from checkpoints_convert.families.table import Entry
from checkpoints_convert.plan import Plan, raise_all
from checkpoints_convert.weight_source import WeightSource

PIECE_BYTES = 64 * 2**20


class Values(NamedTuple):
    """``start`` to ``stop`` of a parameter along ``axis``, in the parameter's dtype."""

    axis: int
    start: int
    stop: int
    values: np.ndarray


class ValueReader:
    """Streams parameters of a plan; remembers which held NaN or infinite values, to report them together."""

    def __init__(self, files: WeightSource, plan: Plan):
        self.files = files
        self.plan = plan
        self._not_finite: list[str] = []

    def pieces(self, parameter: str) -> Iterator[Values]:
        """The parameter piece by piece, at most about ``PIECE_BYTES`` each."""
        entry, target = self.plan.entries[parameter], self.plan.shapes[parameter]
        finite = True
        for axis, start, stop in _cuts(entry, target):
            values = entry.layout.read(self.files, entry.sources, start, stop).astype(target.dtype)
            finite = finite and is_finite(values)
            yield Values(axis, start, stop, values)
        if not finite:
            self._not_finite += self._damage(entry)

    def _damage(self, entry: Entry) -> Iterator[str]:
        """One line for each damaged scale, which makes the values that it scales look damaged; else one for them."""
        scales: dict[str, str] = {}
        for source in entry.sources:
            scales |= self.files.damaged_scales.get(source, {})
        for name, damage in (scales or {", ".join(entry.sources[:2]): "holds NaN or infinite values"}).items():
            yield f"{name} (for {entry.parameter}) {damage}"

    def check_tied_head(self) -> None:
        """Raises UserError where a tied output head is stored and differs from the embedding."""
        if self.plan.tied_head is None:
            return
        embedding, head = self.plan.entries["embedding"].sources[0], self.plan.tied_head
        infos = [self.files.tensors[name] for name in (embedding, head)]
        same = infos[0].shape == infos[1].shape and infos[0].dtype == infos[1].dtype
        rows = max(1, PIECE_BYTES // max(1, 4 * infos[0].shape[1]))
        for start in range(0, infos[0].shape[0] if same else 0, rows):
            stop = min(start + rows, infos[0].shape[0])
            a, b = (self.files.read(name, start, stop) for name in (embedding, head))
            same = same and a.tobytes() == b.tobytes()
        if not same:
            problem = f"{head} differs from {embedding}, though config.json says tie_word_embeddings"
            raise_all(f"{self.files.path}: the tensors do not fit the config", [problem])

    def raise_not_finite(self) -> None:
        """Raises one UserError that lists every parameter read so far whose values are not all finite."""
        raise_all(f"{self.files.path}: damaged weights", self._not_finite)


def _cuts(entry: Entry, target: jax.ShapeDtypeStruct) -> Iterator[tuple[int, int, int]]:
    axis = entry.layout.axis
    if axis is None or not target.shape:
        yield 0, 0, target.shape[0] if target.shape else 1
        return
    size = target.shape[axis]
    slice_bytes = max(1, 4 * int(np.prod(target.shape)) // max(1, size))
    step = max(1, PIECE_BYTES // slice_bytes)
    for start in range(0, size, step):
        yield axis, start, min(start + step, size)


def is_finite(values: np.ndarray) -> bool:
    """Whether no value is NaN or infinite; exponent bits of all ones say otherwise."""
    bits, exponent = {2: (np.uint16, 0x7F80), 4: (np.uint32, 0x7F800000)}[values.dtype.itemsize]
    return not bool(np.any((values.view(bits) & exponent) == exponent))
