"""Sizes as people write them: ``64K`` tokens, ``23.7 GB``."""

import re

from wmtp_jax.errors import UserError

_TOKENS = re.compile(r"(\d{1,12})([kKmM]?)", re.ASCII)
_FACTORS = {"": 1, "k": 2**10, "m": 2**20}
_BYTES = re.compile(r"(\d{1,6}(?:\.\d{1,6})?) ?([kmgt]?b)", re.ASCII | re.IGNORECASE)
_DECIMAL = {"b": 0, "kb": 3, "mb": 6, "gb": 9, "tb": 12}
_SHOWN_DIGITS = 3


def parse_tokens(text: str, option: str = "context") -> int:
    """``"1M"``, ``"64K"`` or ``"1048576"`` as a number of tokens, at least 1; K is 1024 and M is 1024 K.

    Raises UserError that names the option.
    """
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--{option} {text}: must be a number of tokens such as 4096, 64K or 1M")
    tokens = int(match[1]) * _FACTORS[match[2].lower()]
    if tokens < 1:
        raise UserError(f"--{option} {text}: must be 1 token or more")
    return tokens


def parse_bytes(text: str, option: str) -> int:
    """``"8GB"`` or ``"500 MB"`` as bytes, 1 GB being 10^9. Raises UserError that names the option."""
    match = _BYTES.fullmatch(text.strip())
    if text.strip() == "0":
        return 0
    if match is None:
        raise UserError(f"--{option} {text}: must be an amount of memory such as 500MB or 8GB")
    return int(float(match[1]) * 10 ** _DECIMAL[match[2].lower()])


def show_tokens(tokens: int) -> str:
    """The shortest exact form that ``parse_tokens`` reads."""
    for suffix in ("m", "k"):
        if tokens and tokens % _FACTORS[suffix] == 0:
            return f"{tokens // _FACTORS[suffix]}{suffix.upper()}"
    return str(tokens)


def show_bytes(size: float) -> str:
    """Three digits with a decimal unit: 1 GB is 10^9 bytes, as accelerators' memories are given."""
    unit = "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    whole = len(str(int(size)))
    return f"{size:.{max(0, _SHOWN_DIGITS - whole) if unit != 'B' else 0}f} {unit}"
