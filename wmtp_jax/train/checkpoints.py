"""A run's state on the disk: every so often, whole or not at all, and taken up again where it ended."""

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as ocp

from wmtp_jax.errors import UserError

_PREFIX = "checkpoint-"


def save_state(state: dict[str, Any], folder: Path) -> None:
    """Writes checkpoint-STEP of a state that has a ``step``, then drops all but the newest two."""
    path = folder / f"{_PREFIX}{int(state['step']):07d}"
    leaves = {str(index): leaf for index, leaf in enumerate(jax.tree.leaves(state))}
    ocp.save(str(path.absolute()), leaves, overwrite=True)
    for old in sorted(folder.glob(f"{_PREFIX}*"))[:-2]:
        shutil.rmtree(old)


def restore_state(shapes: Any, folder: Path) -> Any:
    """The newest state of this shape, None where there is none. Raises UserError for one of another shape."""
    found = sorted(path for path in folder.glob(f"{_PREFIX}*") if ocp.is_orbax_checkpoint(str(path)))
    if not found:
        return None
    leaves, tree = jax.tree.flatten(shapes)
    try:
        loaded = ocp.load(str(found[-1].absolute()), {str(index): leaf for index, leaf in enumerate(leaves)})
    except (ValueError, KeyError) as error:
        raise UserError(f"{found[-1]}: does not fit this model's configuration ({str(error)[:200]})") from None
    return jax.tree.unflatten(tree, [loaded[str(index)] for index in range(len(leaves))])
