"""Matches stored tensors with a model's parameters, strictly, before any value is read."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints_convert.families import find_family
from checkpoints_convert.families.table import MTP_PREFIX, Entry, Family, Skip, head_name
from checkpoints_convert.quantized import ACTIVATION_SCALES
from checkpoints_convert.tensor_files import TensorInfo
from checkpoints_convert.weight_source import WeightSource
from wmtp_jax.checkpoint import parameter_shapes
from wmtp_jax.config import ModelConfig
from wmtp_jax.errors import UserError

SHOWN_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to fill every parameter, what is left out and why, and everything that does not fit."""

    family: Family
    config: ModelConfig
    hf_config: dict[str, Any]
    entries: dict[str, Entry]
    shapes: dict[str, jax.ShapeDtypeStruct]
    skipped: dict[str, str]
    tied_head: str | None
    problems: tuple[str, ...]

    def raise_problems(self, source: Path) -> None:
        """Raises one UserError that lists every problem, if there is any."""
        raise_all(f"{source}: the tensors do not fit the config", self.problems)


def raise_all(headline: str, problems: Sequence[str]) -> None:
    """One UserError with a headline and up to ``SHOWN_PROBLEMS`` indented lines; nothing without problems."""
    if not problems:
        return
    headline = f"{headline} ({len(problems)} problem{'s' if len(problems) > 1 else ''}):"
    raise UserError("\n".join([headline, *(f"  {line}" for line in shown_problems(problems))]))


def shown_problems(problems: Sequence[str]) -> list[str]:
    """The first ``SHOWN_PROBLEMS``, and how many there are beyond."""
    hidden = len(problems) - SHOWN_PROBLEMS
    return [*problems[:SHOWN_PROBLEMS], *([f"... and {hidden} more"] if hidden > 0 else [])]


def make_plan(files: WeightSource, dtype: jnp.dtype, *, no_mtp: bool = False) -> Plan:
    """Reads the config and compares what it promises with the tensors' names, shapes and dtypes.

    Raises UserError for a config that cannot be read or built; mismatches are collected in ``problems``.
    """
    hf = files.config
    family = find_family(hf)
    stored = files.tensors
    has_mtp = any(name.startswith(MTP_PREFIX) for name in stored)
    config = family.parse_config(hf, mtp_in_files=has_mtp)
    problems: list[str] = []
    if config.has_mtp and not no_mtp and not has_mtp:
        problems.append("config.json promises an MTP draft head, but the files hold no mtp.* tensor; use --no-mtp")
        no_mtp = True
    config = dataclasses.replace(
        config,
        eos_ids=tuple(dict.fromkeys((*config.eos_ids, *files.eos_ids()))),
        mtp_pattern=() if no_mtp else config.mtp_pattern,
    )
    entries = family.table(config, stored)
    used = {source for entry in entries for source in entry.sources}
    skipped, unknown = _sort_unused(family, config, stored, used, no_mtp=no_mtp)
    skipped |= _skipped_companions(files, skipped)
    shapes = parameter_shapes(config, dtype)
    problems += _unfilled(entries, shapes)
    problems += _mismatches(entries, shapes, files)
    problems += [f"unknown tensor {name} {list(stored[name].shape)}" for name in unknown]
    tied = next((name for name, reason in skipped.items() if reason == _TIED_REASON), None)
    return Plan(
        family=family,
        config=config,
        hf_config=hf,
        entries={entry.parameter: entry for entry in entries},
        shapes=shapes,
        skipped=skipped,
        tied_head=tied,
        problems=tuple(problems),
    )


_TIED_REASON = "tied output head, equal to the embedding"
_ACTIVATION_REASON = "activation scale; only weights are read"
_CACHE_SCALES = Skip(re.compile(r"\.[kv]_scale$"), "scale of cached keys or values; only weights are read")


def _sort_unused(
    family: Family, config: ModelConfig, stored: Mapping[str, TensorInfo], used: set[str], *, no_mtp: bool
) -> tuple[dict[str, str], list[str]]:
    skipped: dict[str, str] = {}
    unknown: list[str] = []
    for name in sorted(stored.keys() - used):
        reason = _skip_reason((*family.skips, _CACHE_SCALES), name)
        if reason is None and no_mtp and name.startswith(MTP_PREFIX):
            reason = "draft head, left out by --no-mtp"
        if reason is None and config.tie_embeddings and name == head_name(stored):
            reason = _TIED_REASON
        if reason is None:
            unknown.append(name)
        else:
            skipped[name] = reason
    return skipped, unknown


def _skipped_companions(files: WeightSource, skipped: dict[str, str]) -> dict[str, str]:
    """What goes with a weight that is left out, and of the others what is no part of the weight's values."""
    reasons = {
        name: skipped.get(weight) or (_ACTIVATION_REASON if name.endswith(ACTIVATION_SCALES) else None)
        for name, weight in files.companions.items()
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _skip_reason(skips: tuple[Skip, ...], name: str) -> str | None:
    return next((skip.reason for skip in skips if skip.pattern.search(name)), None)


def _unfilled(entries: list[Entry], shapes: dict[str, jax.ShapeDtypeStruct]) -> list[str]:
    """Holes and overlaps of the name table itself."""
    names = [entry.parameter for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    problems = [f"parameter {name} would be filled twice" for name in twice]
    problems += [f"parameter {name} is filled by no tensor" for name in sorted(shapes.keys() - set(names))]
    return problems + [f"no parameter is called {name}" for name in sorted(set(names) - shapes.keys())]


def _mismatches(entries: list[Entry], shapes: dict[str, jax.ShapeDtypeStruct], files: WeightSource) -> list[str]:
    missing, wrong = [], []
    seen: set[str] = set()
    for entry in entries:
        target = shapes.get(entry.parameter)
        if target is None:
            continue
        for name, shape in zip(entry.sources, entry.layout.source_shapes(target.shape, entry.sources), strict=True):
            if name in seen:
                continue
            seen.add(name)
            info, quantized = files.tensors.get(name), files.quantized.get(name)
            if info is None:
                missing.append(f"missing tensor {name} {list(shape)}")
            elif quantized is not None and quantized.faults:
                wrong += quantized.faults
            elif info.shape != shape:
                wrong.append(f"tensor {name} has shape {list(info.shape)}, expected {list(shape)} from the config")
    return missing + wrong
