"""Muon for the matrices, AdamW for everything else, with a warm-up, plateau and linear decay schedule."""

from typing import Any

import optax
from jaxtyping import Array
from optax import contrib


def schedule(peak: float, warmup: int, decay_from: int, total: int) -> optax.Schedule:
    """Linear to ``peak`` over ``warmup`` steps, flat until ``decay_from``, linear to a fiftieth at ``total``."""
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / max(warmup, 1), peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak / 50, max(total - decay_from, 1)),
        ],
        [warmup, decay_from],
    )


def make_optimizer(learning_rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """Muon with updates scaled to AdamW's size (arXiv 2502.16982), so that one learning rate serves both."""
    muon = contrib.muon(
        learning_rate,
        weight_decay=weight_decay,
        weight_decay_mask=_matrices,
        consistent_rms=0.2,
        adam_b2=0.95,
        muon_weight_dimension_numbers=_dimension_numbers,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def _is_matrix(name: str) -> bool:
    return name.endswith(".kernel") or name.endswith(("up_proj", "down_proj"))


def _matrices(parameters: dict[str, Array]) -> dict[str, bool]:
    return {name: _is_matrix(name) for name in parameters}


def _dimension_numbers(parameters: Any) -> Any:
    """Orthogonalize the last two axes [in, out]; axes before them (periods, experts) are separate matrices."""
    return {
        name: contrib.MuonDimensionNumbers(value.ndim - 2, value.ndim - 1) if _is_matrix(name) else None
        for name, value in parameters.items()
    }
