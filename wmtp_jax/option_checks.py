"""Checks that the options of several commands share."""

from collections.abc import Collection

from wmtp_jax.errors import UserError


def require(option: str, value: int, low: int, high: int | None = None) -> None:
    """Raises UserError where an option is out of range."""
    if value < low or (high is not None and value > high):
        raise UserError(f"--{option} {value}: must be {low} or more" + (f", at most {high}" if high else ""))


def require_one_of(option: str, value: str, allowed: Collection[str]) -> None:
    """Raises UserError for a value that is not among those allowed."""
    if value not in allowed:
        raise UserError(f"--{option} {value or repr('')}: not known; give one of {', '.join(allowed)}")
