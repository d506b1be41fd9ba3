"""One module a family of checkpoints: how its config reads and what its tensors are called."""

from typing import Any

from checkpoints_convert.families import llama, nemotron_h, qwen3_5, qwen3_next
from checkpoints_convert.families.table import Family
from wmtp_jax.errors import UserError

FAMILIES: tuple[Family, ...] = (qwen3_5.FAMILY, qwen3_next.FAMILY, nemotron_h.FAMILY, llama.FAMILY)


def find_family(hf: dict[str, Any]) -> Family:
    """The family that config.json names by ``architectures`` or, without it, ``model_type``."""
    listed = hf.get("architectures") or []
    if not isinstance(listed, list):
        raise UserError(f"config.json: architectures={listed!r} is not a list of names")
    for family in FAMILIES:
        if any(name in family.architectures for name in listed):
            return family
    for family in FAMILIES:
        if not listed and hf.get("model_type") in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    named = ", ".join(map(str, listed)) or f"model_type {hf.get('model_type')!r}"
    raise UserError(f"config.json: architecture {named} is not supported; supported: {known}")
