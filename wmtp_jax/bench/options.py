"""The options of each benchmark, checked. Loads no JAX."""

from dataclasses import dataclass

from wmtp_jax.errors import UserError
from wmtp_jax.generation.options import CACHE_DTYPES, DEFAULT_SINK, DEFAULT_WINDOW, MAX_GAMMA, GenerateOptions
from wmtp_jax.option_checks import require, require_one_of
from wmtp_jax.units import parse_tokens

NATIVE = "native"
CONTINUATION = "continuation"
TASKS = ("needles", "frequent", "common", "variables", CONTINUATION)
# What the demo model was trained on at most; its rotary positions are not stretched beyond.
DEMO_TRAINED_CONTEXT = 4096
_MOST_DIGITS = 12
_MOST_PROMPTS = 100_000


@dataclass(frozen=True, kw_only=True)
class AcceptOptions:
    """What to measure acceptance of.

    - ``tasks``: what the prompts are, see ``wmtp_jax.bench.tasks``.
    - ``windows``: of the draft head; 0 is native. Each of the others runs with each of ``sinks``.
    - ``contexts``: tokens of each prompt. ``new_tokens``: how many follow it.
    - ``prompts``: how many of each task; ``rows`` of them run as one batch.
    - ``temperature``, ``seed``: prompt i draws with seed + i.
    """

    tasks: tuple[str, ...] = (CONTINUATION,)
    gamma: int = 3
    windows: tuple[int, ...] = (0, 128, 512, 1024)
    sinks: tuple[int, ...] = (4,)
    contexts: tuple[int, ...] = (512, 2048, 4096, 16384)
    new_tokens: int = 128
    prompts: int = 8
    rows: int = 4
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require("gamma", self.gamma, 1, MAX_GAMMA)
        require("new-tokens", self.new_tokens, 2)
        require("prompts", self.prompts, 1, _MOST_PROMPTS)
        require("rows", self.rows, 1, _MOST_PROMPTS)
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature {self.temperature}: must be 0 (greedy) or more")
        require("seed", self.seed, 0, 2**32 - 1)
        for task in self.tasks:
            if task not in TASKS:
                raise UserError(f"--tasks: there is no task {task!r}; the tasks are {', '.join(TASKS)}")
        _require_distinct("tasks", self.tasks)
        if self.windows.count(0) > 1:
            raise UserError(f"--windows: 0 and {NATIVE} both mean no window; give one of them, once")
        _require_counts("windows", self.windows, 0)
        _require_counts("sinks", self.sinks, 0)
        _require_counts("contexts", self.contexts, 1)

    @property
    def drafters(self) -> list[tuple[int, int]]:
        """Every (window, sink) to run, native first: the windows are compared with it."""
        windows = sorted(window for window in self.windows if window)
        native = [(0, 0)] if 0 in self.windows else []
        return native + [(window, sink) for window in windows for sink in sorted(self.sinks)]


@dataclass(frozen=True, kw_only=True)
class VersusOptions:
    """How to run against Hugging Face: ``repeats`` measured rounds after a warm-up, on ``threads`` processors."""

    new_tokens: int = 256
    gamma: int = 3
    window: int = 512
    sink: int = 4
    repeats: int = 5
    threads: int = 2

    def __post_init__(self) -> None:
        require("gamma", self.gamma, 1, MAX_GAMMA)
        require("window", self.window, 0)
        require("sink", self.sink, 0)
        require("new-tokens", self.new_tokens, 2)
        require("repeats", self.repeats, 1)
        require("threads", self.threads, 1)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How to start `wmtp generate`: once cold and ``repeats`` times warm after each prompt of ``contexts`` tokens."""

    contexts: tuple[int, ...] = (64, 8192, 16384)
    new_tokens: int = 64
    gamma: int = 3
    window: int = 512
    sink: int = 4
    repeats: int = 3

    def __post_init__(self) -> None:
        require("gamma", self.gamma, 0, MAX_GAMMA)
        require("window", self.window, 0)
        require("sink", self.sink, 0)
        require("new-tokens", self.new_tokens, 1)
        require("repeats", self.repeats, 1)
        _require_counts("contexts", self.contexts, 1)


def parse_names(text: str) -> tuple[str, ...]:
    """``"needles,common"`` as names."""
    return tuple(part.strip() for part in text.split(","))


STEP_MODES = ("plain", "native", "windowed")


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What steps to time.

    - ``contexts``: committed tokens of each of ``rows`` rows; ``modes``: of ``STEP_MODES``.
    - ``steps``: steps a call of the loop; ``repeats``: rounds.
    - ``dtype``: of the weights; ``cache_dtype``: of keys and values, None is the weights'.
    """

    gamma: int = 3
    window: int = DEFAULT_WINDOW
    sink: int = DEFAULT_SINK
    contexts: tuple[int, ...] = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)
    modes: tuple[str, ...] = STEP_MODES
    rows: int = 1
    steps: int = 8
    repeats: int = 5
    dtype: str = "float32"
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        require("gamma", self.gamma, 1, MAX_GAMMA)
        require("window", self.window, 1)
        require("sink", self.sink, 0)
        require_one_of("cache-dtype", self.cached, CACHE_DTYPES)
        for name in ("rows", "steps", "repeats"):
            require(name, getattr(self, name), 1)
        _require_counts("contexts", self.contexts, 1)
        _require_distinct("modes", self.modes)
        for mode in self.modes:
            if mode not in STEP_MODES:
                raise UserError(f"--modes: {mode!r} is not known; give some of {','.join(STEP_MODES)}")

    @property
    def cached(self) -> str:
        """The dtype of keys and values."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Rows of ``context`` tokens that a pool of ``pool_bytes`` admits; the ring is for ``gamma`` drafts a step."""

    pool_bytes: int
    context: int = 2**16
    gamma: int = 6
    window: int = DEFAULT_WINDOW
    sink: int = DEFAULT_SINK
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require("pool", self.pool_bytes, 1)
        require("context", self.context, 1)
        require("gamma", self.gamma, 1, MAX_GAMMA)
        require("window", self.window, 1)
        require("sink", self.sink, 0)


@dataclass(frozen=True, kw_only=True)
class ClpOptions:
    """What to measure: ``rows`` are batch sizes, each measured ``repeats`` times on ``prompts`` prompts.

    - ``taus``: of each rule that has a threshold. ``only``: parts of the names of the ways to run; none is all.
    """

    rows: tuple[int, ...] = (1,)
    prompts: int = 16
    new_tokens: int = 96
    repeats: int = 3
    taus: tuple[float, ...] = (GenerateOptions.tau,)
    only: tuple[str, ...] = ()
    window: int = 0
    sink: int = 0

    def __post_init__(self) -> None:
        require("prompts", self.prompts, 1)
        require("new-tokens", self.new_tokens, 2)
        require("repeats", self.repeats, 1)
        for tau in self.taus:
            GenerateOptions(tau=tau, window=self.window, sink=self.sink)
        if not all(rows > 0 and self.prompts % rows == 0 for rows in self.rows):
            raise UserError(f"--rows {','.join(map(str, self.rows))}: must divide the {self.prompts} prompts")
        _require_distinct("rows", self.rows)
        _require_distinct("tau", self.taus)


@dataclass(frozen=True, kw_only=True)
class EngineBenchOptions:
    """``requests`` by each number of ``clients`` a round; ``long`` is the prompt beside which a short one starts."""

    clients: tuple[int, ...] = (1, 4, 16)
    requests: int = 32
    prompt: int = 64
    new_tokens: int = 64
    long: int = 31 * 2**10
    gamma: int = 3
    rest: bool = False
    window: int = 512
    sink: int = 4
    repeats: int = 3

    def __post_init__(self) -> None:
        _require_counts("clients", self.clients, 1)
        require("requests", self.requests, max(self.clients))
        require("prompt", self.prompt, 1)
        require("new-tokens", self.new_tokens, 2)
        require("gamma", self.gamma, 0, MAX_GAMMA)
        require("long", self.long, 0)
        require("repeats", self.repeats, 1)


def parse_fractions(option: str, text: str) -> tuple[float, ...]:
    """``"0.3,0.5"`` as numbers. Raises UserError that names the option."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--{option} {text!r}: give numbers with commas between") from None


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """``"0,64"`` as numbers. Raises UserError that names the option."""
    return tuple(_count(option, part.strip()) for part in text.split(","))


def parse_contexts(text: str) -> tuple[int, ...]:
    """``"512,4K"`` as numbers of tokens. Raises UserError that names the option."""
    return tuple(parse_tokens(part, "contexts") for part in text.split(","))


def parse_windows(text: str) -> tuple[int, ...]:
    """``"native,128"`` as window sizes, native being 0."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(0 if part == NATIVE else _count("windows", part) for part in parts)


def _count(option: str, part: str) -> int:
    if not (part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS):
        words = f"{NATIVE} or numbers" if option == "windows" else "numbers"
        raise UserError(f"--{option}: {part!r} is not a whole number; give {words} with commas between")
    return int(part)


def _require_counts(option: str, values: tuple[int, ...], low: int) -> None:
    for value in values:
        require(option, value, low)
    _require_distinct(option, values)


def _require_distinct(option: str, values: tuple[int, ...] | tuple[float, ...] | tuple[str, ...]) -> None:
    if len(set(values)) < len(values):
        raise UserError(f"--{option}: {','.join(map(str, values))} holds a value twice")
