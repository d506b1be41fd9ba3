"""What a request says about sampling. Apart from the sampler, so that the command line reads it without JAX."""

from dataclasses import dataclass, fields
from numbers import Integral, Real

from wmtp_jax.errors import UserError

REPETITION_PENALTIES = (0.01, 100.0)
_LARGEST = 1e6
_LEAST_P = 1e-9


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling. ``top_k=0``, ``top_p=1``, ``min_p=0`` and neutral penalties switch a filter off.

    The repetition penalty (CTRL, arXiv 1909.05858) counts prompt and output; presence and frequency penalties count
    the output only. Filters apply in this order: penalties, temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, Integral if field.type is int else Real):
                raise UserError(f"{field.name}={value!r}: must be a {'whole ' if field.type is int else ''}number")
        # The device computes in float32: what overflows or vanishes there would leave no token, or any.
        _require(0.0 <= self.temperature <= _LARGEST, "temperature", self.temperature, f"from 0 to {_LARGEST:g}")
        _require(0 <= self.top_k < 2**31, "top_k", self.top_k, "0 (off) or more, below 2147483648")
        _require(_LEAST_P <= self.top_p <= 1.0, "top_p", self.top_p, f"from {_LEAST_P:g} to 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 to 1")
        least, most = REPETITION_PENALTIES
        _require(
            least <= self.repetition_penalty <= most,
            "repetition_penalty",
            self.repetition_penalty,
            f"from {least:g} to {most:g}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(abs(getattr(self, name)) <= _LARGEST, name, getattr(self, name), f"within {_LARGEST:g} of 0")
        _require(0 <= self.seed < 2**32, "seed", self.seed, "from 0 to 4294967295")

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def filters(self) -> bool:
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


def _require(fine: bool, name: str, value: float | int, allowed: str) -> None:
    if not fine:
        raise UserError(f"{name}={value}: must be {allowed}")
