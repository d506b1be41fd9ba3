"""Streams a Hugging Face folder or a GGUF file into an Orbax checkpoint, piece by piece."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from checkpoints_convert.atomic import atomic_folder
from checkpoints_convert.open_source import local_path, open_source
from checkpoints_convert.plan import Plan, make_plan
from checkpoints_convert.values import ValueReader
from wmtp_jax.checkpoint import (
    INDEX_NAME,
    MODEL_NAME,
    PARAMS_NAME,
    Piece,
    StoredParameter,
    index_json,
    part_path,
    piece_key,
)
from wmtp_jax.config import config_to_json
from wmtp_jax.dtypes import parse_dtype
from wmtp_jax.errors import UserError

# Bounds memory together with values.PIECE_BYTES: about four times this is in use while a part is written.
PART_BYTES = 128 * 2**20

# Called with the bytes written so far and the bytes in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did. ``skipped`` maps tensors that were left out to the reason."""

    source: str
    out: str
    family: str
    dtype: str
    parameters: int
    parameter_bytes: int
    has_mtp: bool
    skipped: dict[str, str]
    warnings: tuple[str, ...]
    seconds: float


def convert(
    source: str | Path,
    out: str | Path,
    *,
    dtype: jnp.dtype | str = "bfloat16",
    no_mtp: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Converts a Hugging Face folder, a hub id or a GGUF file into the folder ``out``.

    Memory stays constant, whatever the checkpoint's size. ``out`` appears complete or not at all. ``dtype`` is that
    of the stored weights, bfloat16 or float32; loading may take another. Raises UserError that lists every mismatch.
    """
    started = time.monotonic()
    if not str(out):
        raise UserError("the folder to make has an empty name: give another")
    path, out = local_path(source), Path(out).absolute()
    _keep_apart(path, out)
    dtype = parse_dtype(dtype)
    with open_source(path) as files:
        plan = make_plan(files, dtype, no_mtp=no_mtp)
        plan.raise_problems(path)
        values = ValueReader(files, plan)
        values.check_tied_head()
        total = sum(_nbytes(shape.shape, shape.dtype) for shape in plan.shapes.values())
        with atomic_folder(out, force=force, needed_bytes=total) as building:
            write_parameters(values, plan, building / PARAMS_NAME, total, progress)
            values.raise_not_finite()
            (building / MODEL_NAME).write_text(config_to_json(plan.config))
            warnings = files.write_companions(building)
    return Report(
        source=str(source),
        out=str(out),
        family=plan.family.name,
        dtype=str(dtype),
        parameters=sum(int(np.prod(shape.shape)) for shape in plan.shapes.values()),
        parameter_bytes=total,
        has_mtp=plan.config.has_mtp,
        skipped=plan.skipped,
        warnings=tuple(warnings),
        seconds=time.monotonic() - started,
    )


def _keep_apart(path: Path, out: Path) -> None:
    source, target = path.resolve(), out.resolve()
    if source == target or target in source.parents:
        raise UserError(f"{out}: would replace the source {path}; choose another folder")


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def write_parameters(
    values: ValueReader, plan: Plan, params: Path, total_bytes: int, progress: Progress | None = None
) -> None:
    """Writes every parameter of a plan into numbered parts under ``params``, and the index."""
    params.mkdir()
    parts = _PartWriter(params)
    stored: dict[str, StoredParameter] = {}
    done = 0
    for name, target in plan.shapes.items():
        pieces, axis = [], 0
        for cut in values.pieces(name):
            axis = cut.axis
            pieces.append(parts.add(name, cut.start, cut.stop, cut.values))
            done += cut.values.nbytes
            if progress is not None:
                progress(done, total_bytes)
        stored[name] = StoredParameter(shape=target.shape, dtype=str(target.dtype), axis=axis, pieces=tuple(pieces))
    parts.flush()
    (params / INDEX_NAME).write_text(index_json(stored))


class _PartWriter:
    """Collects pieces and writes them out as one small Orbax checkpoint at a time.

    Orbax's own partial saving keeps one growing checkpoint, but rereads what it has at every step.
    """

    def __init__(self, params: Path):
        self._params = params
        self._number = 0
        self._waiting: dict[str, np.ndarray] = {}

    def add(self, name: str, start: int, stop: int, values: np.ndarray) -> Piece:
        if self._waiting and sum(v.nbytes for v in self._waiting.values()) + values.nbytes > PART_BYTES:
            self.flush()
        piece = Piece(self._number, start, stop)
        self._waiting[piece_key(name, piece)] = np.ascontiguousarray(values)
        return piece

    def flush(self) -> None:
        if not self._waiting:
            return
        context = ocp.Context()
        # Weights hardly compress, and the size on disk is then known beforehand.
        context.array.saving.use_compression = False
        with context:
            ocp.save(str(part_path(self._params, self._number)), self._waiting)
        self._number += 1
        self._waiting = {}
