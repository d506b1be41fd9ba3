"""What commands print: one JSON object on standard output, everything for people on standard error."""

import dataclasses
import enum
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any


def print_json(value: object) -> None:
    """Prints one value as one line of strict JSON on standard output; see `jsonable` for what it may hold."""
    print(json.dumps(jsonable(value), allow_nan=False), flush=True)


def note(message: str) -> None:
    """Prints a line for people on standard error."""
    print(printable(message), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """The text with every control character but the newline escaped, so that no name or prompt steers a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def jsonable(value: Any) -> Any:
    """Turns dataclasses, mappings, sequences, arrays, enums and paths into what JSON has.

    JSON has no infinities and no NaN: they become null. Raises `TypeError` for anything else.
    """
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return _jsonable_container(value)


def _jsonable_container(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, set | frozenset):
        return [jsonable(item) for item in sorted(value)]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")
