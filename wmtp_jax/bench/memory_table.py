"""Admitted rows as a table for people."""

from collections.abc import Sequence

from rich.table import Table

from wmtp_jax.bench.memory import Admission
from wmtp_jax.bench.options import MemoryOptions
from wmtp_jax.units import show_bytes, show_tokens


def memory_table(results: Sequence[Admission], options: MemoryOptions) -> Table:
    """A line a kind of draft cache."""
    pool, context = show_bytes(options.pool_bytes), show_tokens(options.context)
    table = Table(
        caption=f"{pool} for rows of {context} tokens ({options.dtype}); "
        f"window {options.window}, sink {options.sink}, gamma {options.gamma}; every row allocated and written"
    )
    table.add_column("draft cache")
    for title in ("rows", "bytes a row", "target", "draft", "recurrent state", "draft's share of the cache"):
        table.add_column(title, justify="right")
    for result in results:
        sizes = (result.target_bytes, result.draft_bytes, result.state_bytes)
        parts = [show_bytes(size / result.rows) for size in sizes]
        table.add_row(result.mode, str(result.rows), show_bytes(result.row_bytes), *parts, f"{result.draft_share:.1%}")
    return table
