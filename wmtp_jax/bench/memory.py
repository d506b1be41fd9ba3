"""What caches really allocate, native against ring, and how many rows one memory holds with each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from wmtp_jax.bench.machine import require_free
from wmtp_jax.bench.options import MemoryOptions
from wmtp_jax.bench.synthetic import fill
from wmtp_jax.cache.paged import allocate, default_page_size
from wmtp_jax.cache.ring import allocate_ring
from wmtp_jax.cache.ring_shape import ring_shape
from wmtp_jax.config import ModelConfig
from wmtp_jax.errors import UserError
from wmtp_jax.models.decoder import abstract
from wmtp_jax.units import show_bytes, show_tokens


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Rows that one pool of memory took in. Bytes are those of the arrays that were allocated and written."""

    mode: str
    rows: int
    target_bytes: int
    draft_bytes: int
    state_bytes: int

    @property
    def row_bytes(self) -> float:
        return (self.target_bytes + self.draft_bytes + self.state_bytes) / self.rows

    @property
    def draft_share(self) -> float:
        """The draft's part of all keys and values."""
        return self.draft_bytes / (self.target_bytes + self.draft_bytes)


def measure_memory(config: ModelConfig, options: MemoryOptions, note: Callable[[str], None]) -> list[Admission]:
    """Admits rows of ``context`` tokens until the next would pass ``pool_bytes``, with native drafts, then with rings.

    Every row is allocated and filled. Raises UserError for a model without a head, and for a pool too small for one row
    or too large for this machine.
    """
    if not config.has_mtp:
        raise UserError("this preset has no MTP head, so there is no draft cache to compare")
    require_free(options.pool_bytes, "--pool")
    return [
        _admit(config, options, mode, window, sink, note)
        for mode, window, sink in (("native", 0, 0), ("windowed", options.window, options.sink))
    ]


def _admit(
    config: ModelConfig, options: MemoryOptions, mode: str, window: int, sink: int, note: Callable[[str], None]
) -> Admission:
    dtype, rows = jnp.dtype(options.dtype), []

    def row() -> tuple[Any, Any, Any]:
        page = default_page_size(options.context)
        cache = allocate(config, [options.context], page, dtype)
        capacity = cache.table.shape[1] * page
        a = config.attention
        shape = ring_shape(window, sink, options.gamma, capacity)
        draft = allocate_ring(1, a.num_kv_heads, a.head_dim, shape, dtype)
        states = jax.eval_shape(lambda: abstract(config, dtype).initial_states(1))
        return cache, draft, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), states)

    size = sum(map(_bytes, jax.eval_shape(row)))
    if size > options.pool_bytes:
        pool, tokens = show_bytes(options.pool_bytes), show_tokens(options.context)
        raise UserError(f"--pool: {pool} hold no row of {tokens} tokens, which takes {show_bytes(size)}")
    while (len(rows) + 1) * size <= options.pool_bytes:
        rows.append(tuple(fill(part) for part in row()))
        jax.block_until_ready(rows[-1])
        note(f"{mode}: row {len(rows)}, {show_bytes(len(rows) * size)} of {show_bytes(options.pool_bytes)}")
    target, draft, state = (sum(_bytes(row[part]) for row in rows) for part in range(3))
    admission = Admission(mode=mode, rows=len(rows), target_bytes=target, draft_bytes=draft, state_bytes=state)
    for leaf in jax.tree.leaves(rows):
        leaf.delete()
    return admission


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
