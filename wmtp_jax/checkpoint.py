"""Converted checkpoints: how they lie on disk, and how they become a model.

``FOLDER/model.json`` describes the model. ``FOLDER/params`` holds numbered parts, each a small Orbax checkpoint, and
``index.json``, which says where the pieces of every parameter are. Blocks are stored one by one and stacked on
loading; parts follow the order in which loading needs them.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from wmtp_jax.config import ModelConfig, read_config
from wmtp_jax.dtypes import parse_dtype
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder, abstract

MODEL_NAME = "model.json"
PARAMS_NAME = "params"
INDEX_NAME = "index.json"
INDEX_FORMAT = 1
_DRAFT_HEAD = "mtp."
BATCH_BYTES = 256 * 2**20

# Writes the parameters named by the keys into the arrays given for them.
Fill = Callable[[dict[str, np.ndarray]], None]


class Piece(NamedTuple):
    """``start`` to ``stop`` along the parameter's axis, in the part of that number."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """One parameter in ``index.json``; ``axis`` is the one along which it is cut into pieces."""

    shape: tuple[int, ...]
    dtype: str
    axis: int
    pieces: tuple[Piece, ...]

    def piece_shape(self, piece: Piece) -> tuple[int, ...]:
        """The shape of one piece."""
        if not self.shape:
            return ()
        return (*self.shape[: self.axis], piece.stop - piece.start, *self.shape[self.axis + 1 :])


def piece_key(name: str, piece: Piece) -> str:
    """What a piece is called inside its part."""
    return f"{name}#{piece.start}"


def part_path(params: Path, number: int) -> Path:
    """The folder of one part."""
    return params / f"{number:05d}"


def load_checkpoint(
    folder: str | Path, dtype: jnp.dtype | None = None, *, no_mtp: bool = False
) -> tuple[ModelConfig, Decoder]:
    """The model of a folder that ``wmtp convert`` made: its weights plus one stacked tensor in memory at most.

    ``dtype`` None takes bfloat16 on accelerators and float32 on CPUs. ``no_mtp`` leaves the draft head on the disk.
    Raises UserError for a damaged folder.
    """
    folder = Path(folder)
    config, stored = read_model_config(folder), read_index(folder)
    dtype = parse_dtype(dtype)
    if no_mtp:
        config = dataclasses.replace(config, mtp_pattern=())
        stored = {name: parameter for name, parameter in stored.items() if not name.startswith(_DRAFT_HEAD)}
    _check_complete(folder, stored, parameter_shapes(config, dtype))

    def fill(outputs: dict[str, np.ndarray]) -> None:
        for part, pieces in _by_part(stored, outputs):
            arrays = _load_part(part_path(folder / PARAMS_NAME, part), stored, pieces)
            for name, piece in pieces:
                region = (slice(None),) * stored[name].axis + (slice(piece.start, piece.stop),)
                outputs[name][region if stored[name].shape else ()] = arrays[piece_key(name, piece)]

    return config, assemble(config, dtype, fill)


def read_model_config(folder: Path) -> ModelConfig:
    """The description in a converted folder. Raises UserError where it is missing or damaged."""
    path = folder / MODEL_NAME
    try:
        return read_config(path)
    except UserError as error:
        raise UserError(f"{path}: {error}; convert the model again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); is {folder} a folder that `wmtp convert` made?") from None


def read_index(folder: Path) -> dict[str, StoredParameter]:
    """Every stored parameter by name. Raises UserError where the index is missing or damaged."""
    path = folder / PARAMS_NAME / INDEX_NAME
    try:
        index = json.loads(path.read_text())
        if index["format"] != INDEX_FORMAT:
            raise UserError(f"{path}: format {index['format']}, this version reads {INDEX_FORMAT}; convert again")
        return {name: _stored_parameter(fields) for name, fields in index["parameters"].items()}
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); convert the model again") from None


def index_json(stored: dict[str, StoredParameter]) -> str:
    """What ``read_index`` reads."""
    parameters = {
        name: {"shape": p.shape, "dtype": p.dtype, "axis": p.axis, "pieces": p.pieces} for name, p in stored.items()
    }
    return json.dumps({"format": INDEX_FORMAT, "parameters": parameters})


def _stored_parameter(fields: dict[str, Any]) -> StoredParameter:
    return StoredParameter(
        shape=tuple(fields["shape"]),
        dtype=str(jnp.dtype(fields["dtype"])),
        axis=fields["axis"],
        pieces=tuple(Piece(*piece) for piece in fields["pieces"]),
    )


def _check_complete(folder: Path, stored: dict[str, StoredParameter], shapes: dict[str, jax.ShapeDtypeStruct]) -> None:
    for name, shape in shapes.items():
        found = stored.get(name)
        if found is None:
            raise UserError(f"{folder}: parameter {name} is not in the checkpoint; convert the model again")
        if found.shape != shape.shape:
            raise UserError(f"{folder}: parameter {name} is {found.shape}, not {shape.shape} as model.json says")
        ends = [0, *(piece.stop for piece in found.pieces)]
        starts = [*(piece.start for piece in found.pieces), found.shape[found.axis] if found.shape else 1]
        if starts != ends:
            raise UserError(f"{folder}: parameter {name} has a hole in its pieces; convert the model again")
    extra = sorted(stored.keys() - shapes.keys())
    if extra:
        raise UserError(f"{folder}: the checkpoint's parameter {extra[0]} is not in model.json's model; convert again")


def _by_part(
    stored: dict[str, StoredParameter], outputs: dict[str, np.ndarray]
) -> Iterator[tuple[int, list[tuple[str, Piece]]]]:
    parts: dict[int, list[tuple[str, Piece]]] = {}
    for name in outputs:
        for piece in stored[name].pieces:
            parts.setdefault(piece.part, []).append((name, piece))
    yield from sorted(parts.items())


def _load_part(
    path: Path, stored: dict[str, StoredParameter], pieces: list[tuple[str, Piece]]
) -> dict[str, np.ndarray]:
    # Imported here, since Orbax takes as long to import as JAX and a Hugging Face folder does without it.
    import orbax.checkpoint.experimental.v1 as ocp

    wanted = {
        piece_key(name, piece): np.empty(stored[name].piece_shape(piece), stored[name].dtype) for name, piece in pieces
    }
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            return ocp.load(str(path), wanted)
    except (OSError, ValueError, KeyError, TypeError, ocp.errors.InvalidLayoutError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: damaged part of the checkpoint ({reason:.200}); convert the model again") from None


def parameter_shapes(config: ModelConfig, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter by name, blocks unstacked, in the order in which ``assemble`` fills them.

    ``blocks.7.mixer.q_proj.kernel`` is in the 8th block of the decoder, counted over all periods.
    """
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in _leaves(_abstract(config, dtype)):
        shape = leaf.shape[1:] if path[0] == "blocks" else leaf.shape
        shapes |= {name: jax.ShapeDtypeStruct(shape, leaf.dtype) for name in _parameter_names(config, path)}
    return shapes


def assemble(config: ModelConfig, dtype: jnp.dtype, fill: Fill) -> Decoder:
    """Builds a model whose parameters ``fill`` writes, called with a few stacked arrays' worth at a time."""
    tree = _abstract(config, dtype)
    graph, state = nnx.split(tree)
    values: list[jax.Array] = []
    waiting: list[np.ndarray] = []
    outputs: dict[str, np.ndarray] = {}
    leaves = _leaves(tree)
    for index, (path, leaf) in enumerate(leaves):
        host = np.empty(leaf.shape, leaf.dtype)
        waiting.append(host)
        names = _parameter_names(config, path)
        outputs |= {name: host[i, ...] for i, name in enumerate(names)} if path[0] == "blocks" else {names[0]: host}
        if sum(array.nbytes for array in waiting) >= BATCH_BYTES or index == len(leaves) - 1:
            fill(outputs)
            values += [jax.device_put(array) for array in waiting]
            waiting, outputs = [], {}
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), values))


@functools.lru_cache(maxsize=1)
def _abstract(config: ModelConfig, dtype: jnp.dtype) -> Decoder:
    """Tracing a model takes about a second, and loading needs its tree twice."""
    return abstract(config, dtype)


def _leaves(tree: Decoder) -> list[tuple[tuple[Any, ...], jax.ShapeDtypeStruct]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(tree)))
    return [(tuple(key.key for key in path), leaf) for path, leaf in flat]


def _parameter_names(config: ModelConfig, path: tuple[Any, ...]) -> list[str]:
    if path[0] != "blocks":
        return [".".join(map(str, path))]
    slot, rest = path[1], ".".join(map(str, path[2:]))
    return [f"blocks.{block}.{rest}" for block in stacked_blocks(config, slot)]


def stacked_blocks(config: ModelConfig, slot: int) -> range:
    """The decoder's blocks whose parameters are stacked in ``Decoder.blocks[slot]``, in order."""
    begin = 0
    for segment in config.segments:
        period = len(segment.pattern)
        if slot < period:
            return range(begin + slot, begin + len(segment.blocks), period)
        slot, begin = slot - period, begin + len(segment.blocks)
    raise IndexError(slot)
