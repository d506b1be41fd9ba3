"""The cost of one step at a synthetic context: plain, native and windowed, phase by phase."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import jax.numpy as jnp

from wmtp_jax.bench.machine import Machine, free_bytes
from wmtp_jax.bench.options import StepOptions
from wmtp_jax.bench.phases import DRAFT_PHASES, TARGET_PHASES, run_phase
from wmtp_jax.bench.step_work import phase_work, step_work
from wmtp_jax.bench.synthetic import SyntheticRows, cache_bytes
from wmtp_jax.bench.timing import Spread
from wmtp_jax.cache.paged import default_page_size
from wmtp_jax.decode.drafter import Drafter, MTPDrafter, Plain
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.sampling import Sampling, batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import Packed, pack
from wmtp_jax.plan.roofline import Work
from wmtp_jax.units import show_tokens

# A short phase is repeated until it is well above the noise of the clock and of the dispatch.
_LEAST_SECONDS = 0.1
_MOST_REPETITIONS = 64

Call = Callable[[Drafter, DecodeState], DecodeState]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Milliseconds a step, a value a round; what they moved and computed; and the share of the machine's own limit."""

    ms: Spread
    gigabytes: float
    gigaflops: float
    roofline: float


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """One way to decode at one context. ``host_ms`` is a step's share of a call that runs none: dispatch."""

    mode: str
    step: Cost
    phases: dict[str, Cost]
    host_ms: Spread

    @property
    def draft_ms(self) -> float:
        """Both draft phases; 0 in plain decoding."""
        return sum(self.phases[name].ms.median for name in DRAFT_PHASES if name in self.phases)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """All modes at one context; none where it does not fit the memory."""

    context: int
    needed_bytes: int
    modes: tuple[ModeResult, ...]

    @property
    def gain(self) -> float | None:
        """How many times faster a windowed step is than a native one."""
        medians = {mode.mode: mode.step.ms.median for mode in self.modes}
        return medians["native"] / medians["windowed"] if {"native", "windowed"} <= set(medians) else None


def measure_steps(
    model: Decoder, machine: Machine, options: StepOptions, note: Callable[[str], None]
) -> list[StepResult]:
    """Every context, shortest first. One that does not fit the free memory is noted and comes back without modes.

    Contexts with pages of one size share buffers and programs: work follows the true length, not the allocated one.
    Raises UserError for drafts by a model without a head.
    """
    if not model.config.has_mtp and set(options.modes) - {"plain"}:
        raise UserError("this preset has no MTP head to draft with: give --modes plain")
    results = []
    for group in _groups(options):
        free = free_bytes()
        needed = {context: _needed_bytes(model, options, context) for context in group}
        fitting = [context for context in group if free is None or needed[context] <= free]
        if fitting:
            results += _measure_group(model, machine, options, fitting, note)
        for context in group[len(fitting) :]:
            note(f"{show_tokens(context)}: left out, it needs {needed[context] / 1e9:.1f} GB of memory")
            results.append(StepResult(context=context, needed_bytes=needed[context], modes=()))
    return results


def _needed_bytes(model: Decoder, options: StepOptions, context: int) -> int:
    """Bytes of the caches that a context is measured with."""
    drafters = {mode: _drafter(mode, options) for mode in options.modes}
    return cache_bytes(model, drafters, context + _spare(options), options.rows, jnp.dtype(options.cached))


def _groups(options: StepOptions) -> list[list[int]]:
    """Contexts by the page size that a row of theirs would get."""
    contexts = sorted(options.contexts)
    return [list(group) for _, group in groupby(contexts, lambda c: default_page_size(c + _spare(options)))]


def _spare(options: StepOptions) -> int:
    return options.steps * (options.gamma + 1)


def _measure_group(
    model: Decoder, machine: Machine, options: StepOptions, contexts: list[int], note: Callable[[str], None]
) -> Iterator[StepResult]:
    drafters = {mode: _drafter(mode, options) for mode in options.modes}
    longest = contexts[-1]
    note(f"up to {show_tokens(longest)}: filling {_needed_bytes(model, options, longest) / 1e9:.2f} GB")
    rows = SyntheticRows(model, drafters, longest + _spare(options), options.rows, jnp.dtype(options.cached))
    packed, sampling = pack(model), batch_sampling([SamplingParams()] * options.rows)
    for context in contexts:
        note(f"{show_tokens(context)}: warming up")
        calls = {mode: _calls(packed, sampling, options, mode, rows, context) for mode in options.modes}
        spreads = {mode: {name: Spread() for name in calls[mode]} for mode in options.modes}
        for index in range(options.repeats):
            note(f"{show_tokens(context)}: round {index + 1} of {options.repeats}")
            for mode, named in calls.items():
                for name, (call, times) in named.items():
                    spreads[mode][name].append(1e3 * rows.seconds(mode, context, call) / times)
        modes = tuple(_result(model, machine, options, context, mode, spreads[mode]) for mode in options.modes)
        yield StepResult(context=context, needed_bytes=_needed_bytes(model, options, context), modes=modes)


def _drafter(mode: str, options: StepOptions) -> Drafter:
    if mode == "plain":
        return Plain()
    window = (options.window, options.sink) if mode == "windowed" else (0, 0)
    return MTPDrafter(gamma=options.gamma, window=window[0], sink=window[1])


def _calls(
    model: Packed[Decoder], sampling: Sampling, options: StepOptions, mode: str, rows: SyntheticRows, context: int
) -> dict[str, tuple[Call, int]]:
    """What to time, warmed up, each with how many steps or repetitions one call is."""
    stops = jnp.full((options.rows, 1), -1, jnp.int32)

    def step(drafter: Drafter, state: DecodeState) -> DecodeState:
        return decode(model, drafter, state, sampling, stops, options.steps)[0]

    def host(drafter: Drafter, state: DecodeState) -> DecodeState:
        return decode(model, drafter, replace(state, done=~state.done), sampling, stops, options.steps)[0]

    def repeated(phase: str, times: int) -> Call:
        def call(drafter: Drafter, state: DecodeState) -> DecodeState:
            if phase in DRAFT_PHASES:
                return run_phase(phase, model, drafter, state, sampling, jnp.int32(times))
            # One program for whoever drafts: the target's phases know only how many drafts there are.
            anyone = MTPDrafter(gamma=drafter.gamma) if drafter.gamma else Plain()
            after = run_phase(phase, model, anyone, replace(state, draft=None), sampling, jnp.int32(times))
            return replace(after, draft=state.draft)

        return call

    calls: dict[str, tuple[Call, int]] = {"step": (step, options.steps), "host": (host, options.steps)}
    for call in (step, host):
        rows.seconds(mode, context, call)
    for phase in (*(() if mode == "plain" else DRAFT_PHASES), *TARGET_PHASES):
        rows.seconds(mode, context, repeated(phase, 1))
        once = rows.seconds(mode, context, repeated(phase, 1))
        times = min(max(1, int(_LEAST_SECONDS / once)), _MOST_REPETITIONS)
        calls[phase] = (repeated(phase, times), times)
    return calls


def _result(
    model: Decoder, machine: Machine, options: StepOptions, context: int, mode: str, spreads: dict[str, Spread]
) -> ModeResult:
    def cost(ms: Spread, work: Work) -> Cost:
        moved = work.weight_bytes + work.cache_bytes
        limit = max(moved / machine.read_bandwidth, work.flops / machine.matrix_flops)
        return Cost(ms=ms, gigabytes=moved / 1e9, gigaflops=work.flops / 1e9, roofline=1e3 * limit / ms.median)

    works = phase_work(model.config, options, context, mode)
    phases = {name: cost(spreads[name], work) for name, work in works.items()}
    step = cost(spreads["step"], step_work(works))
    return ModeResult(mode=mode, step=step, phases=phases, host_ms=spreads["host"])
