"""The options of a request and the only copy of their defaults. Loads no JAX, for the command line's sake."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.errors import UserError

if TYPE_CHECKING:
    from wmtp_jax.decode.drafter import Proposing
    from wmtp_jax.decode.loop import Stepping

MAX_GAMMA = 8
AUTO = "auto"
# Every number of drafts is a branch of the loop with a forward pass of its own to compile.
MOST_AUTO_DRAFTS = 4
Accept = Literal["verify", "clp", "gate", "threshold", "all"]
ACCEPTS: tuple[str, ...] = get_args(Accept)
# The best at three heads in the measurements of CLP (arXiv 2606.10935).
DEFAULT_TAU = 0.3
# The window and sink of the windowed-MTP measurements on models with a context of up to a million tokens.
DEFAULT_WINDOW = 4032
DEFAULT_SINK = 64
# Positions are 32-bit numbers; a page or a chunk beyond a million tokens is a slip of the hand.
_LARGEST, _LARGEST_STEP = 2**30, 2**20
CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to generate; a bad value raises UserError.

    - ``max_new_tokens``: a row's limit; 0 gives empty output.
    - ``gamma``: drafted tokens a step, 0 (plain decoding) to 8; ``"auto"`` chooses anew every step, by what drafts are
      likely to be right and what steps cost on this machine.
    - ``accept``: ``"verify"`` keeps the target's own text. ``"clp"``, ``"gate"``, ``"threshold"`` and ``"all"`` emit
      what the model's heads write without asking the target, as far as that rule trusts them: they CHANGE THE TEXT.
    - ``tau``: how sure ``clp``, ``gate`` or ``threshold`` must be, 0 to 1.
    - ``window``, ``sink``: what the draft head sees; ``window=0`` is native MTP. The sink goes with a window: None is
      ``DEFAULT_SINK`` with one, 0 without.
    - ``temperature`` to ``frequency_penalty``: see ``SamplingParams``; temperature 0 is greedy.
    - ``seed``: row b draws with seed + b; or a list of seeds, one a row.
    - ``stop``: one stop string or several. The text ends before the first of them.
    - ``ignore_eos``: end-of-text tokens do not end a row.
    - ``page_size``, ``chunk``: positions a cache page (None: what this machine reads fastest), and prompt tokens a
      forward pass. Neither changes the text.
    - ``cache_dtype``: of the target's keys and values; None is the weights' own. Eight-bit ones come with a scale a
      position and head, change the target's text a little, and leave the draft cache in the weights' dtype.
    - ``steps_per_read``: steps between two looks at the emitted tokens: fewer stream more evenly, more cost less.
    - ``step_costs``: with ``gamma="auto"``, milliseconds of a step with 0, 1, ... drafts; None measures them on the
      first steps.
    - ``drafter``: another way to draft, in place of ``gamma``, ``window`` and ``sink``.
    - ``on_progress``: called with (prompt tokens read, all) after every chunk of the prompt.
    """

    max_new_tokens: int = 128
    gamma: int | Literal["auto"] = 3
    accept: Accept = "verify"
    tau: float = DEFAULT_TAU
    window: int = DEFAULT_WINDOW
    sink: int | None = None
    temperature: float = SamplingParams.temperature
    top_k: int = SamplingParams.top_k
    top_p: float = SamplingParams.top_p
    min_p: float = SamplingParams.min_p
    repetition_penalty: float = SamplingParams.repetition_penalty
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    seed: int | Sequence[int] = SamplingParams.seed
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    page_size: int | None = None
    chunk: int = 256
    cache_dtype: str | None = None
    steps_per_read: int = 8
    step_costs: Sequence[float] | None = None
    drafter: "Proposing | Stepping | None" = None
    on_progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        require_integer("max_new_tokens", self.max_new_tokens, 0)
        if self.gamma != AUTO or self.drafter is not None:
            require_integer("gamma", self.most_drafts, 0, MAX_GAMMA)
        self._check_acceptance()
        require_integer("window", self.window, 0, _LARGEST)
        require_integer("sink", self.draft_sink, 0, _LARGEST)
        for name in ("chunk", "steps_per_read"):
            require_integer(name, getattr(self, name), 1, _LARGEST_STEP)
        if self.page_size is not None:
            require_integer("page_size", self.page_size, 1, _LARGEST_STEP)
        if self.draft_sink and not self.window:
            raise UserError(f"sink={self.sink} needs a window: give one, or sink=0 for the native draft")
        if self.cache_dtype is not None and str(self.cache_dtype) not in CACHE_DTYPES:
            raise UserError(
                f"cache_dtype={str(self.cache_dtype) or repr('')}: must be one of {', '.join(CACHE_DTYPES)}"
            )
        if self.stop is None or any(not isinstance(stop, str) or not stop for stop in self.stop_strings):
            raise UserError("a stop string must be text of at least one character", field="stop")
        self.row_sampling(len(self.seed) if isinstance(self.seed, Sequence) else 1)

    def _check_acceptance(self) -> None:
        if self.accept not in ACCEPTS:
            raise UserError(f"accept={self.accept}: must be one of {', '.join(ACCEPTS)}")
        if self.accept != "verify" and self.drafter is not None:
            raise UserError(f"accept={self.accept} is for the model's own heads: leave drafter out")
        if self.step_costs is not None and self.gamma != AUTO:
            raise UserError('step_costs are for gamma="auto" alone')
        if self.accept != "verify" and self.gamma == AUTO:
            raise UserError(f"accept={self.accept} takes what its rule says of a fixed number of heads: give gamma=K")
        if isinstance(self.tau, bool) or not isinstance(self.tau, int | float) or not 0 <= self.tau <= 1:
            raise UserError(f"tau={self.tau}: must be a number from 0 to 1")
        if self.step_costs is not None and not all(0 < cost < math.inf for cost in self.step_costs):
            raise UserError("step_costs: must be milliseconds above 0")

    @property
    def most_drafts(self) -> int:
        """Drafts a step, whoever makes them; with ``"auto"``, at most."""
        if self.drafter is not None:
            return self.drafter.gamma
        return MOST_AUTO_DRAFTS if self.gamma == AUTO else self.gamma

    @property
    def draft_sink(self) -> int:
        """The sink, with its default where there is a window."""
        if self.sink is None:
            return DEFAULT_SINK if self.window else 0
        return self.sink

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, one or several given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def row_sampling(self, rows: int) -> list[SamplingParams]:
        """Each row's sampling. Raises UserError where a list of seeds has another length."""
        if not isinstance(self.seed, Sequence):
            self._sampling(self.seed)
            return [self._sampling((self.seed + row) % 2**32) for row in range(rows)]
        if len(self.seed) != rows:
            raise UserError(f"seed: {len(self.seed)} seeds for {rows} prompts; give one each, or a single number")
        return [self._sampling(seed) for seed in self.seed]

    def _sampling(self, seed: int) -> SamplingParams:
        require_integer("seed", seed, 0, 2**32 - 1)
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
        )


def require_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises UserError for anything but a whole number in range."""
    # Without naming numpy, which the command line's help does without: its whole numbers index like Python's.
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"from {low} to {high}"
        raise UserError(f"{name}={value}: must be a whole number, {allowed}", field=name)
