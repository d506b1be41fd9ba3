"""Parameters by name: a flat view of a module's tree, for optimizers, checkpoints and conversion."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

import jax
from flax import nnx
from jaxtyping import Array

Module = TypeVar("Module", bound=nnx.Module)


def named_parameters(module: nnx.Module) -> dict[str, Any]:
    """Every array of a module (or of its abstract form) by its dotted path, e.g. ``blocks.0.mixer.q_proj.kernel``."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(module)}


def with_parameters(module: Module, parameters: Mapping[str, Any]) -> Module:
    """The module with every array replaced by the one of the same name. Raises KeyError where one is missing."""
    paths, tree = jax.tree_util.tree_flatten_with_path(module)
    return jax.tree_util.tree_unflatten(tree, [parameters[_name(path)] for path, _ in paths])


def _name(path: tuple) -> str:
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path]
    return ".".join(str(key) for key in keys if key not in ("value", "raw_value"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed(Generic[Module]):
    """A module as a flat tuple of its arrays: what a jitted function that is called often should take.

    Flattening a module of a thousand arrays takes Python milliseconds at every call; a tuple takes none.
    """

    arrays: tuple[Array, ...]
    structure: "_Structure" = field(metadata={"static": True})

    def unpack(self) -> Module:
        """The module again."""
        return jax.tree.unflatten(self.structure.tree, self.arrays)


class _Structure:
    """A tree definition compared by identity: comparing two large ones takes as long as flattening."""

    def __init__(self, tree: Any):
        self.tree = tree


@lru_cache(maxsize=64)
def _structure(tree: Any) -> _Structure:
    return _Structure(tree)


def pack(module: Module) -> Packed[Module]:
    """The module's arrays, packed; modules of one structure share compiled programs."""
    arrays, tree = jax.tree.flatten(module)
    return Packed(tuple(arrays), _structure(tree))
