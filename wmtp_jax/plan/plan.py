"""A whole plan: what a model weighs, what a row holds, how many fit, and what a step should cost."""

from dataclasses import dataclass

from wmtp_jax.errors import UserError
from wmtp_jax.plan.hardware import Hardware
from wmtp_jax.plan.memory import RESERVE, RowBytes, draft_format, position_bytes, row_bytes, rows_that_fit, weight_bytes
from wmtp_jax.plan.options import PlanOptions
from wmtp_jax.plan.published import Comparison, compare, is_published
from wmtp_jax.plan.roofline import CALIBRATED, ROOFLINE, Constants, Setting, StepCost, plain_step, speculative_step
from wmtp_jax.plan.sizes import ModelSizes
from wmtp_jax.plan.source import read_sizes
from wmtp_jax.units import show_bytes


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Steps under one set of constants; None for what the model or the options leave out."""

    constants: Constants
    plain: StepCost
    native: StepCost | None
    windowed: StepCost | None

    @property
    def gain(self) -> float | None:
        """How many times faster a windowed step is than a native one."""
        if self.native is None or self.windowed is None:
            return None
        return self.native.step_ms / self.windowed.step_ms


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything ``wmtp plan`` prints. ``rows_native`` and ``rows_windowed`` fit beside the weights."""

    options: PlanOptions
    hardware: Hardware
    sizes: ModelSizes
    target_weight_bytes: int
    draft_weight_bytes: int
    target_cache_bytes_per_token: int
    draft_cache_bytes_per_token: int
    row: RowBytes
    rows_native: int
    rows_windowed: int
    steps: tuple[StepCosts, ...]
    published: tuple[Comparison, ...]
    warnings: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        return self.target_weight_bytes + self.draft_weight_bytes

    @property
    def draft_share(self) -> float:
        """The draft's share of a token's keys and values: 1 in (attention layers + 1) where both have one format."""
        whole = self.target_cache_bytes_per_token + self.draft_cache_bytes_per_token
        return self.draft_cache_bytes_per_token / whole if whole else 0.0


def make_plan(options: PlanOptions) -> Plan:
    """Plans for ``options``. Raises UserError for a model that cannot be read, or that has no head to draft with."""
    sizes, hardware = read_sizes(options.model), options.machine
    if options.gamma and not sizes.draft_layers:
        raise UserError(f"{options.model}: has no MTP head to draft with: use --gamma 0")
    weights = [weight_bytes(sizes, options.weight_format, draft=draft) for draft in (False, True)]
    row = row_bytes(
        sizes,
        options.weight_format,
        options.cache_format,
        context=options.context,
        gamma=options.gamma,
        window=options.window,
        sink=options.draft_sink,
    )
    fitting = [rows_that_fit(hardware, sum(weights), size) for size in (row.native, row.windowed)]
    entry = position_bytes(sizes, options.cache_format)
    draft_entry = position_bytes(sizes, draft_format(options.weight_format, options.cache_format))
    return Plan(
        options=options,
        hardware=hardware,
        sizes=sizes,
        target_weight_bytes=weights[0],
        draft_weight_bytes=weights[1],
        target_cache_bytes_per_token=sizes.attention_layers * entry,
        draft_cache_bytes_per_token=sizes.draft_layers * draft_entry,
        row=row,
        rows_native=fitting[0],
        rows_windowed=fitting[1],
        steps=tuple(_steps(sizes, options, constants) for constants in _constants(hardware)),
        published=_comparisons(options, sizes),
        warnings=tuple(_warnings(options, sizes, sum(weights), fitting[1])),
    )


def _constants(hardware: Hardware) -> tuple[Constants, ...]:
    """The calibrated constants come from GPUs and say nothing about other machines."""
    return (ROOFLINE, CALIBRATED) if hardware.kind == "gpu" else (ROOFLINE,)


def _steps(sizes: ModelSizes, options: PlanOptions, constants: Constants) -> StepCosts:
    hardware = options.machine
    setting = Setting(
        weights=options.weight_format,
        cache=options.cache_format,
        context=options.context,
        rows=options.rows,
        gamma=options.gamma,
    )

    def speculative(window: int, sink: int) -> StepCost:
        return speculative_step(sizes, setting, hardware, constants, window=window, sink=sink)

    return StepCosts(
        constants=constants,
        plain=plain_step(sizes, setting, hardware, constants),
        native=speculative(0, 0) if options.gamma else None,
        windowed=speculative(options.window, options.draft_sink) if options.gamma and options.window else None,
    )


def _comparisons(options: PlanOptions, sizes: ModelSizes) -> tuple[Comparison, ...]:
    if not is_published(options.model, options.hardware, options.gamma):
        return ()
    return tuple(compare(options.model, sizes))


def _warnings(options: PlanOptions, sizes: ModelSizes, weights: int, fitting: int) -> list[str]:
    found = []
    if options.context > sizes.max_positions:
        found.append(f"{options.context} tokens are more than the {sizes.max_positions} that the model was made for")
    hardware = options.machine
    usable = hardware.memory_bytes * (1 - RESERVE)
    if weights > usable:
        found.append(
            f"the weights ({show_bytes(weights)}) alone exceed the {show_bytes(usable)} that {hardware.name} has for "
            "weights and caches: take smaller formats or more chips"
        )
    elif fitting < options.rows:
        found.append(f"{options.rows} rows do not fit: {fitting} do")
    return found
