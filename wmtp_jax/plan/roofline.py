"""The cost of a step: each phase moves bytes and multiplies numbers, and the slower of the two is its time.

Two sets of constants: ``ROOFLINE`` has none of its own, so that its times are floors that no implementation can beat;
``CALIBRATED`` adds two that were fitted to published measurements, the same two for every model.
"""

from dataclasses import dataclass
from typing import NamedTuple

from wmtp_jax.plan.hardware import Hardware
from wmtp_jax.plan.memory import FLOAT32_BYTES, draft_format, parameter_bytes, position_bytes
from wmtp_jax.plan.sizes import ModelSizes

# Decay, S^T k, the rank-one update and S^T q, for every element of a recurrent memory.
_STATE_FLOPS = 7


@dataclass(frozen=True, kw_only=True)
class Constants:
    """``attention_efficiency``: share of the bandwidth at which keys and values are read; ``launch_s``: a forward's."""

    name: str
    attention_efficiency: float
    launch_s: float


ROOFLINE = Constants(name="roofline", attention_efficiency=1.0, launch_s=0.0)
# Derived in docs/planning.md from how the published gap between native and windowed steps grows with the context
# (three models, one geometric mean), and from the published cost of one windowed draft forward of one model.
CALIBRATED = Constants(name="calibrated", attention_efficiency=0.24, launch_s=0.56e-3)


class Work(NamedTuple):
    """What a phase does: weights and recurrent states moved, keys and values read, products, and forwards launched."""

    weight_bytes: float
    cache_bytes: float
    flops: float
    forwards: int

    def times(self, count: int) -> "Work":
        """The same work ``count`` times."""
        return Work(count * self.weight_bytes, count * self.cache_bytes, count * self.flops, count * self.forwards)

    def seconds(self, hardware: Hardware, constants: Constants) -> float:
        """max(bytes / bandwidth, flops / rate), and the launches."""
        effective_bytes = self.weight_bytes + self.cache_bytes / constants.attention_efficiency
        busy = max(effective_bytes / hardware.bandwidth, self.flops / hardware.matrix_flops)
        return busy + self.forwards * constants.launch_s


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is run: formats, ``rows`` rows of ``context`` committed tokens, ``gamma`` drafts a step."""

    weights: str
    cache: str
    context: int
    rows: int
    gamma: int


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One step's phases in milliseconds."""

    draft_extend_ms: float
    draft_decode_ms: float
    verify_ms: float

    @property
    def step_ms(self) -> float:
        return self.draft_extend_ms + self.draft_decode_ms + self.verify_ms


def plain_step(sizes: ModelSizes, setting: Setting, hardware: Hardware, constants: Constants) -> StepCost:
    """A step of plain decoding: the target over one token a row."""
    verify = verify_work(sizes, setting, 1).seconds(hardware, constants)
    return StepCost(draft_extend_ms=0.0, draft_decode_ms=0.0, verify_ms=1e3 * verify)


def speculative_step(
    sizes: ModelSizes, setting: Setting, hardware: Hardware, constants: Constants, *, window: int, sink: int
) -> StepCost:
    """A step with ``gamma`` drafts; ``window=0`` is native MTP, which reads the whole context."""
    works = (
        extend_work(sizes, setting),
        draft_work(sizes, setting, window, sink),
        verify_work(sizes, setting, setting.gamma + 1),
    )
    extend, decode, verify = (1e3 * work.seconds(hardware, constants) for work in works)
    return StepCost(draft_extend_ms=extend, draft_decode_ms=decode, verify_ms=verify)


def extend_work(sizes: ModelSizes, setting: Setting) -> Work:
    """Keys and values of the entries that the last verification committed, counted as all gamma + 1 of them."""
    tokens = setting.rows * (setting.gamma + 1)
    one = parameter_bytes(sizes, setting.weights, draft=True).projections
    return Work(sizes.extend_parameters * one, 0.0, 2.0 * sizes.extend_parameters * tokens, 1)


def draft_work(sizes: ModelSizes, setting: Setting, window: int, sink: int) -> Work:
    """``gamma`` forwards of the head, one token a row, over what it sees and on average half of this step's drafts."""
    seen = min(setting.context, window + sink) if window else setting.context
    keys = setting.rows * (seen + (setting.gamma + 1) / 2)
    one = Work(
        _read_bytes(sizes, setting, setting.rows, draft=True),
        keys * sizes.draft_layers * position_bytes(sizes, draft_format(setting.weights, setting.cache)),
        setting.rows * 2.0 * sizes.read(sizes.draft, 1).total + _attention_flops(sizes, keys * sizes.draft_layers),
        1,
    )
    return one.times(setting.gamma)


def verify_work(sizes: ModelSizes, setting: Setting, tokens: int) -> Work:
    """One forward of the target over ``tokens`` tokens a row. Recurrent states are read and written once."""
    every = setting.rows * tokens
    states = setting.rows * sizes.state_elements * FLOAT32_BYTES * 2
    keys = setting.rows * setting.context * sizes.attention_layers
    flops = every * (2.0 * sizes.active + _STATE_FLOPS * sizes.state_elements)
    return Work(
        _read_bytes(sizes, setting, every, draft=False) + states,
        keys * position_bytes(sizes, setting.cache),
        flops + tokens * _attention_flops(sizes, keys),
        1,
    )


def _attention_flops(sizes: ModelSizes, keys: float) -> float:
    """Scores and weighted values of one query token."""
    return 4.0 * sizes.num_heads * sizes.head_dim * keys


def _read_bytes(sizes: ModelSizes, setting: Setting, tokens: int, *, draft: bool) -> float:
    part = sizes.draft if draft else sizes.target
    return sizes.read(part, tokens).dot(parameter_bytes(sizes, setting.weights, draft=draft))
