"""How every op picks its implementation: ``None`` always works, a name that cannot run raises and says why."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Implementation = TypeVar("Implementation", bound=Callable)


def choose(op: str, table: Mapping[str, Implementation], implementation: str | None) -> Implementation:
    """The named implementation of ``op``, or the portable ``xla`` one. Raises ValueError for an unknown name."""
    name = implementation or "xla"
    if name not in table:
        raise ValueError(f"{op}: implementation={name!r} does not exist; choose one of {sorted(table)} or None")
    return table[name]
