"""What an engine's options come to for one model: its drafter, pages and arrays, and how many rows a memory holds."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from wmtp_jax.cache.paged import default_page_size
from wmtp_jax.decode.drafter import Proposing
from wmtp_jax.decode.loop import Stepping
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.engine.capped import Capped
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.engine.slots import Slots
from wmtp_jax.errors import UserError
from wmtp_jax.generation.drafting import make_drafter
from wmtp_jax.model import Model
from wmtp_jax.models.parameters import pack

# Below so many tokens a chunk costs what its weights cost to read.
_SMALLEST_CHUNK = 32


@dataclass(frozen=True)
class Layout:
    """``row_pages`` hold the longest request of ``positions``, ``pages`` are the pool's."""

    slots: Slots
    page_size: int
    row_pages: int
    pages: int
    dtype: Any
    positions: int

    def fresh(self) -> DecodeState:
        """The engine's arrays, nothing in them."""
        return self.slots.fresh(self.pages, self.page_size, self.row_pages * self.page_size, self.dtype)

    @property
    def nbytes(self) -> int:
        """Of those arrays, without making them."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(self.fresh)))


def layout(model: Model, options: EngineOptions, drafter: Proposing | None = None) -> Layout:
    """Raises UserError for options that do not go together or with the model."""
    made = drafter or make_drafter(model, options.generate_options())
    if isinstance(made, Stepping):
        raise UserError("the engine verifies what is drafted: leave steps of another kind to wmtp.generate")
    page_size = options.page_size or default_page_size(options.context)
    # A short page has no room for a whole chunk.
    chunk = min(options.chunk, page_size)
    if page_size % chunk:
        raise UserError(f"chunk={chunk} must divide page_size={page_size}")
    chunks = [chunk]
    while chunks[0] % 2 == 0 and chunks[0] >= 2 * _SMALLEST_CHUNK:
        chunks.insert(0, chunks[0] // 2)
    row_pages = -(-options.context // page_size)
    pages = options.rows * row_pages if options.pages is None else options.pages
    run = made.gamma + 1
    # The last token of all is emitted and never read.
    positions = min(options.context, pages * page_size, model.config.max_positions + 1)
    if positions < run + 2:
        raise UserError(
            f"pages={pages} of {page_size} positions hold no request: the shortest needs {run + 2} positions"
        )
    decoder = model.decoder
    return Layout(
        slots=Slots(decoder, pack(decoder), Capped(drafter=made), options.rows, tuple(chunks)),
        page_size=page_size,
        row_pages=row_pages,
        pages=pages,
        positions=positions,
        dtype=jnp.dtype(options.cache_dtype or decoder.embedding.dtype),
    )


def state_bytes(model: Model, options: EngineOptions) -> int:
    """Bytes of an engine's arrays beside the weights; allocates nothing."""
    return layout(model, options).nbytes


def rows_in(model: Model, memory: int, options: EngineOptions) -> int:
    """How many rows of ``options.context`` so many bytes hold beside the weights, each with its draft cache and states.

    A window makes the draft cache a ring, and what that saves is room for more rows.
    """
    one, two = (state_bytes(model, replace(options, rows=rows, pages=None)) for rows in (1, 2))
    return max(0, 1 + (memory - one) // (two - one))
