"""A plan as one JSON object and as text for people."""

import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from wmtp_jax.plan.memory import RESERVE
from wmtp_jax.plan.plan import Plan, StepCosts
from wmtp_jax.plan.published import CACHE, LONG, SINK, WEIGHTS, WINDOW
from wmtp_jax.plan.roofline import CALIBRATED, StepCost
from wmtp_jax.units import show_bytes, show_tokens

_WIDTH = 120


def plan_json(plan: Plan) -> dict[str, Any]:
    """What ``--json`` prints: bytes and milliseconds, unrounded."""
    options, sizes = plan.options, plan.sizes
    return {
        "model": options.model,
        "options": {
            **asdict(options),
            "sink": options.draft_sink,
            "weights": options.weight_format,
            "cache": options.cache_format,
        },
        "hardware": {**asdict(plan.hardware), "reserve": RESERVE},
        "parameters": {
            "total": sizes.target.total + sizes.draft.total,
            "target": sizes.target.total,
            "draft": sizes.draft.total,
            "active": sizes.active,
        },
        "weight_bytes": {
            "total": plan.weight_bytes,
            "target": plan.target_weight_bytes,
            "draft": plan.draft_weight_bytes,
        },
        "cache_bytes_per_token": {
            "target": plan.target_cache_bytes_per_token,
            "draft": plan.draft_cache_bytes_per_token,
            "draft_share": plan.draft_share,
        },
        "row_bytes": {**plan.row._asdict(), "native": plan.row.native, "windowed": plan.row.windowed},
        "rows_that_fit": {"native": plan.rows_native, "windowed": plan.rows_windowed},
        "steps": {costs.constants.name: _steps_json(costs) for costs in plan.steps},
        "published": [
            {**asdict(row), "roofline_off": row.roofline_off, "calibrated_off": row.calibrated_off}
            for row in plan.published
        ],
        "warnings": list(plan.warnings),
    }


def _steps_json(costs: StepCosts) -> dict[str, Any]:
    steps = {"plain": costs.plain, "native": costs.native, "windowed": costs.windowed}
    return {
        "constants": asdict(costs.constants),
        **{name: step and {**asdict(step), "step_ms": step.step_ms} for name, step in steps.items()},
        "gain": costs.gain,
    }


def print_plan(plan: Plan) -> None:
    """Prints sizes, step costs and, where there are any, the published figures beside them."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False, soft_wrap=True)
    for name, value in _lines(plan).items():
        console.print(f"{name:<14} {value}")
    console.print(_step_table(plan))
    if plan.published:
        console.print(_published_table(plan))


def _lines(plan: Plan) -> dict[str, str]:
    options, sizes, row, hardware = plan.options, plan.sizes, plan.row, plan.hardware
    rows = {
        "model": f"{options.model}: {sizes.attention_layers} attention layers, {sizes.draft_layers} in the draft head",
        "parameters": f"{_count(sizes.target.total + sizes.draft.total)}, {_count(sizes.draft.total)} of them the "
        f"draft head's; {_count(sizes.active)} active a token",
        "weights": f"{show_bytes(plan.weight_bytes)} in {options.weight_format}",
        "cache a token": f"{plan.target_cache_bytes_per_token} B target, {plan.draft_cache_bytes_per_token} B draft "
        f"({plan.draft_share:.1%} of both) in {options.cache_format}",
        "a row": f"at {show_tokens(options.context)} tokens: {show_bytes(row.pages)} pages, {show_bytes(row.state)} "
        "recurrent state",
    }
    if options.gamma:
        rows["  native"] = f"{show_bytes(row.draft_native)} draft cache, {show_bytes(row.native)} in all"
    if options.gamma and options.window:
        rows["  windowed"] = f"{show_bytes(row.draft_ring)} draft cache, {show_bytes(row.windowed)} in all"
    rows["hardware"] = (
        f"{hardware.name}: {show_bytes(hardware.memory_bytes)}, {show_bytes(hardware.bandwidth)}/s, "
        f"{hardware.matrix_flops / 1e12:.4g} TFLOP/s"
    )
    fitting = [f"{plan.rows_native} native"] if options.gamma else [f"{plan.rows_native} plain"]
    fitting += [f"{plan.rows_windowed} windowed"] if options.gamma and options.window else []
    rows["rows that fit"] = f"{', '.join(fitting)}, with {RESERVE:.0%} of the memory kept back"
    return rows


def _step_table(plan: Plan) -> Table:
    options = plan.options
    seen = f", window {options.window}, sink {options.draft_sink}" if options.gamma and options.window else ""
    caption = f"gamma {options.gamma}{seen}, rows {options.rows}; roofline: a floor"
    if len(plan.steps) > 1:
        caption += (
            f"\ncalibrated: attention reads at {CALIBRATED.attention_efficiency:.0%} of the bandwidth and "
            f"{1e3 * CALIBRATED.launch_s:.2f} ms a forward, fitted to published runs on a B200"
        )
    table = Table(caption=caption)
    for title in ("constants", "step"):
        table.add_column(title)
    for title in ("draft-extend ms", "draft-decode ms", "verify ms", "step ms", "gain"):
        table.add_column(title, justify="right")
    for costs in plan.steps:
        named = {"plain": costs.plain, "native": costs.native, "windowed": costs.windowed}
        given = [(name, step) for name, step in named.items() if step is not None]
        for index, (name, step) in enumerate(given):
            gain = f"{costs.gain:.2f}x" if name == "windowed" and costs.gain else ""
            last = index == len(given) - 1
            table.add_row("" if index else costs.constants.name, name, *_step_cells(step), gain, end_section=last)
    return table


def _step_cells(step: StepCost) -> list[str]:
    parts = (step.draft_extend_ms, step.draft_decode_ms, step.verify_ms, step.step_ms)
    return [_milliseconds(part) if part else "-" for part in parts]


def _published_table(plan: Plan) -> Table:
    caption = (
        f"arXiv 2607.21535: one B200, one row of {LONG:,} tokens, {WEIGHTS} weights, {CACHE} cache, window {WINDOW}, "
        f"sink {SINK}\nboth predictions for this setting, whatever was asked for above"
    )
    table = Table(caption=caption)
    table.add_column("published")
    for title in ("figure", "roofline", "off", "calibrated", "off"):
        table.add_column(title, justify="right")
    for row in plan.published:
        table.add_row(
            row.what,
            f"{row.published:.2f}",
            f"{row.roofline:.2f}",
            _off(row.roofline_off),
            f"{row.calibrated:.2f}",
            _off(row.calibrated_off),
        )
    return table


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _off(share: float) -> str:
    return f"{round(100 * share):+d} %"


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
