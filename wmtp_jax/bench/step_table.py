"""Step costs as a table for people and as a picture."""

from collections.abc import Sequence

from rich.table import Table

from wmtp_jax.bench.machine import Machine
from wmtp_jax.bench.options import StepOptions
from wmtp_jax.bench.step import ModeResult, StepResult
from wmtp_jax.units import show_tokens

_PHASES = {
    "draft_extend": "extend",
    "draft_decode": "draft",
    "verify": "verify",
    "attention": "attention in it",
    "commit": "commit",
}


def step_table(results: Sequence[StepResult], machine: Machine, options: StepOptions) -> Table:
    """A section a context, a line a mode; milliseconds, medians."""
    table = Table(caption=_caption(machine, options))
    for title in ("context", "decoding"):
        table.add_column(title)
    for title in ("step ms", "low - high", *_PHASES.values(), "host", "of roofline", "attention's"):
        table.add_column(title, justify="right")
    for result in results:
        for index, mode in enumerate(result.modes):
            table.add_row("" if index else show_tokens(result.context), *_cells(mode))
        if result.gain is not None:
            table.add_row("", f"windowed is {result.gain:.2f}x native", style="bold")
        if not result.modes:
            table.add_row(show_tokens(result.context), f"left out: needs {result.needed_bytes / 1e9:.1f} GB")
        table.add_section()
    return table


def _cells(mode: ModeResult) -> list[str]:
    ms = mode.step.ms
    phases = [_ms(mode.phases[name].ms.median) if name in mode.phases else "" for name in _PHASES]
    shares = [f"{share:.0%}" for share in (mode.step.roofline, mode.phases["attention"].roofline)]
    spread = f"{_ms(ms.low)} - {_ms(ms.high)}"
    return [mode.mode, _ms(ms.median), spread, *phases, _ms(mode.host_ms.median), *shares]


def _ms(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _caption(machine: Machine, options: StepOptions) -> str:
    return (
        f"{machine.device}: reads {machine.read_bandwidth / 1e9:.1f} GB/s, multiplies "
        f"{machine.matrix_flops / 1e9:.0f} GFLOP/s; weights {options.dtype}, cache {options.cached}; "
        f"gamma {options.gamma}, window {options.window}, sink {options.sink}, rows {options.rows}; "
        f"medians of {options.repeats} rounds"
    )
