"""Loads a Hugging Face folder straight into memory."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.hub import require_folder
from checkpoints_convert.plan import make_plan
from checkpoints_convert.values import ValueReader
from checkpoints_convert.weight_folder import WeightFolder
from wmtp_jax.checkpoint import assemble
from wmtp_jax.config import ModelConfig
from wmtp_jax.dtypes import parse_dtype
from wmtp_jax.models.decoder import Decoder


def load_hf(folder: str | Path, *, dtype: jnp.dtype | None = None, no_mtp: bool = False) -> tuple[ModelConfig, Decoder]:
    """A model from a Hugging Face folder: its weights plus one stacked tensor in memory at most.

    ``dtype`` None takes bfloat16 on accelerators and float32 on CPUs. Raises UserError that lists every mismatch.
    """
    folder = Path(folder)
    require_folder(folder)
    dtype = parse_dtype(dtype)
    with WeightFolder(folder) as files:
        plan = make_plan(files, dtype, no_mtp=no_mtp)
        plan.raise_problems(folder)
        values = ValueReader(files, plan)
        values.check_tied_head()

        def fill(outputs: dict[str, np.ndarray]) -> None:
            for name, out in outputs.items():
                for piece in values.pieces(name):
                    out[(slice(None),) * piece.axis + (slice(piece.start, piece.stop),)] = piece.values

        model = assemble(plan.config, dtype, fill)
        values.raise_not_finite()
    return plan.config, model
