"""The published step costs of Windowed-MTP, and how far the model here is from them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wmtp_jax.plan.hardware import HARDWARE
from wmtp_jax.plan.roofline import CALIBRATED, ROOFLINE, Constants, Setting, speculative_step
from wmtp_jax.plan.sizes import ModelSizes

# arXiv 2607.21535: one B200, one row, NVFP4 weights, bfloat16 cache, seven verified tokens.
HARDWARE_NAME = "b200"
GAMMA = 6
WINDOW = 4032
SINK = 64
LONG = 1_040_000
SHORT = 261_000
WEIGHTS = "nvfp4"
CACHE = "bf16"


class PublishedSteps(NamedTuple):
    """Milliseconds a step at 1.04M tokens, native over windowed at 261K, native minus windowed at 261K and 1.04M."""

    native_ms: float
    windowed_ms: float
    gain_261k: float
    difference_261k_ms: float
    difference_1m_ms: float


PUBLISHED = {
    "qwen3_6_35b": PublishedSteps(26.4, 18.3, 1.27, 3.4, 7.9),
    "qwen3_5_122b": PublishedSteps(34.5, 26.5, 1.24, 3.5, 7.8),
    "nemotron_3_super": PublishedSteps(33.1, 25.8, 1.17, 3.2, 6.8),
}
# One windowed draft forward of qwen3_6_35b at 1.04M tokens.
PUBLISHED_FORWARD_MS = 0.71


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One published figure and the two predictions of it."""

    what: str
    published: float
    roofline: float
    calibrated: float

    @property
    def roofline_off(self) -> float:
        """Relative: -0.1 is 10 % too low."""
        return self.roofline / self.published - 1

    @property
    def calibrated_off(self) -> float:
        """Relative: -0.1 is 10 % too low."""
        return self.calibrated / self.published - 1


def is_published(model: str, hardware: str, gamma: int) -> bool:
    """Whether published steps exist for these three."""
    return model in PUBLISHED and hardware == HARDWARE_NAME and gamma == GAMMA


def compare(model: str, sizes: ModelSizes) -> list[Comparison]:
    """Published steps of a model beside the predictions for the published setting."""
    steps = PUBLISHED[model]
    native, windowed = (_both(sizes, LONG, window) for window in (0, WINDOW))
    native_short, windowed_short = (_both(sizes, SHORT, window) for window in (0, WINDOW))
    growth = (steps.difference_1m_ms - steps.difference_261k_ms) * 1e6 / (LONG - SHORT)
    predicted_growth = (native - windowed - native_short + windowed_short) * 1e6 / (LONG - SHORT)
    rows = (
        ("native step ms", steps.native_ms, native),
        ("windowed step ms", steps.windowed_ms, windowed),
        ("gain of windowed", steps.native_ms / steps.windowed_ms, native / windowed),
        ("gain of windowed at 261K", steps.gain_261k, native_short / windowed_short),
        ("native - windowed at 261K ms", steps.difference_261k_ms, native_short - windowed_short),
        ("native - windowed at 1.04M ms", steps.difference_1m_ms, native - windowed),
        ("its growth, ms a million tokens", growth, predicted_growth),
    )
    return [
        Comparison(what=what, published=value, roofline=float(predicted[0]), calibrated=float(predicted[1]))
        for what, value, predicted in rows
    ]


def _both(sizes: ModelSizes, context: int, window: int) -> np.ndarray:
    return np.array([_step_ms(sizes, context, window, constants) for constants in (ROOFLINE, CALIBRATED)])


def _step_ms(sizes: ModelSizes, context: int, window: int, constants: Constants) -> float:
    setting = Setting(weights=WEIGHTS, cache=CACHE, context=context, rows=1, gamma=GAMMA)
    sink = SINK if window else 0
    return speculative_step(sizes, setting, HARDWARE[HARDWARE_NAME], constants, window=window, sink=sink).step_ms
