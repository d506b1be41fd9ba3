"""`wmtp inspect`: what a model folder or GGUF file holds, without loading weights."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from wmtp_jax.cli.output import print_json, printable


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("inspect")(inspect_command)


def inspect_command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A Hugging Face or converted folder, a hub id or a GGUF file.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show layers, parameters, cache bytes a token and what a conversion would skip."""
    from checkpoints_convert.summary import inspect

    summary = inspect(path)
    if json:
        print_json(summary)
    else:
        print(printable("\n".join(_lines(summary))))


def _lines(summary: Mapping[str, Any]) -> list[str]:
    from checkpoints_convert.plan import shown_problems

    sizes, size_bytes, cache = summary["parameters"], summary["parameter_bytes"], summary["cache_bytes_per_token"]
    layers = ", ".join(f"{count} {kind}" for kind, count in summary["layers"].items() if kind != "total")
    rows = {
        "model": f"{summary['path']} ({summary['format']})",
        "family": summary["family"] or "as described in model.json",
        "layers": f"{summary['layers']['total']}: {layers}",
        "draft head": "yes" if summary["has_mtp"] else "no",
        "parameters": f"{sizes['total']:,} ({size_bytes['total'] / 1e9:.3f} GB in {summary['dtype']})",
        "  stored as": ", ".join(f"{count:,} {name}" for name, count in summary["stored_values"].items()),
        "  embeddings": f"{sizes['embeddings']:,} ({size_bytes['embeddings'] / 1e9:.3f} GB)",
        "  draft head": f"{sizes['draft_head']:,} ({size_bytes['draft_head'] / 1e9:.3f} GB)",
        "cache a token": f"{cache['target']} B target, {cache['draft']} B draft ({cache['draft_share']:.1%} of both)",
        "state a row": f"{summary['recurrent_state_bytes_per_row'] / 2**20:.2f} MiB, whatever the length",
        "end ids": ", ".join(map(str, summary["eos_ids"])) or "none",
    }
    lines = [f"{name:<14} {value}" for name, value in rows.items()] + skipped_lines(summary["skipped"])
    return lines + [f"problem: {problem}" for problem in shown_problems(summary["problems"])]


def skipped_lines(skipped: Mapping[str, str]) -> list[str]:
    """One line a reason, with how many tensors it leaves out."""
    return [f"skipped {count} tensors: {reason}" for reason, count in Counter(skipped.values()).most_common()]
