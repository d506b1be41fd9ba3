"""What to plan for, checked."""

from dataclasses import dataclass

from wmtp_jax.errors import UserError
from wmtp_jax.generation.options import DEFAULT_SINK, DEFAULT_WINDOW, MAX_GAMMA
from wmtp_jax.option_checks import require, require_one_of
from wmtp_jax.plan.hardware import Hardware, find_hardware
from wmtp_jax.plan.memory import CACHE_FORMATS, WEIGHT_FORMATS


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A bad value raises UserError.

    - ``context``: committed tokens of each of ``rows`` rows; ``gamma``: drafts a step, 0 is plain decoding only.
    - ``window``, ``sink``: what the windowed draft sees; ``window=0`` plans without it. The sink goes with a window:
      None is the default one with a window, 0 without.
    - ``weights``, ``cache``: formats; None is bf16, on a CPU float32.
    """

    model: str
    hardware: str
    context: int = 2**20
    gamma: int = 6
    window: int = DEFAULT_WINDOW
    sink: int | None = None
    rows: int = 1
    weights: str | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        find_hardware(self.hardware)
        require("context", self.context, 1)
        require("gamma", self.gamma, 0, MAX_GAMMA)
        require("window", self.window, 0)
        require("sink", self.draft_sink, 0)
        require("rows", self.rows, 1)
        if self.draft_sink and not self.window:
            raise UserError(f"--sink {self.sink}: needs a window; give --window, or leave the sink out")
        require_one_of("weights", self.weight_format, WEIGHT_FORMATS)
        require_one_of("cache", self.cache_format, CACHE_FORMATS)

    @property
    def machine(self) -> Hardware:
        return find_hardware(self.hardware)

    @property
    def draft_sink(self) -> int:
        """The sink, with its default where there is a window."""
        if self.sink is None:
            return DEFAULT_SINK if self.window else 0
        return self.sink

    @property
    def weight_format(self) -> str:
        return self.machine.weights if self.weights is None else self.weights

    @property
    def cache_format(self) -> str:
        return self.machine.cache if self.cache is None else self.cache
