"""Step cost against context, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from wmtp_jax.bench.picture import new_figure, save
from wmtp_jax.bench.step import StepResult
from wmtp_jax.units import show_tokens

_STYLES = {"plain": ("o-", "0.45"), "native": ("s-", "tab:red"), "windowed": ("^-", "tab:blue")}


def plot_steps(results: Sequence[StepResult], title: str, path: Path) -> None:
    """Step cost (and, thinner, its draft phases) against context, on logarithmic axes, as a PNG."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    measured = [result for result in results if result.modes]
    for mode, (style, color) in _STYLES.items():
        found = [(result.context, m) for result in measured for m in result.modes if m.mode == mode]
        if not found:
            continue
        contexts = [context for context, _ in found]
        axes.plot(contexts, [m.step.ms.median for _, m in found], style, color=color, label=f"{mode} step")
        if mode != "plain":
            axes.plot(contexts, [m.draft_ms for _, m in found], ":", color=color, label=f"{mode} draft alone")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([result.context for result in measured], [show_tokens(result.context) for result in measured])
    axes.set(xlabel="context, tokens", ylabel="milliseconds a step", title=title)
    axes.grid(which="both", alpha=0.25)
    axes.legend()
    save(figure, path)
