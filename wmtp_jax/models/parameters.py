"""Parameters by name: a flat view of a module's tree, for optimizers, checkpoints and conversion."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

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
