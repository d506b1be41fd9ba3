"""The results of ``bench engine`` as tables."""

from collections.abc import Sequence

from rich.table import Table

from wmtp_jax.bench.engine import FirstToken, Throughput
from wmtp_jax.bench.options import EngineBenchOptions
from wmtp_jax.bench.tables import spread


def throughput_table(results: Sequence[Throughput], options: EngineBenchOptions) -> Table:
    """A line a number of clients."""
    drafts = f"{options.gamma}, or none where that is faster" if options.rest else str(options.gamma)
    table = Table(
        caption=f"{options.requests} requests a round, prompts of {options.prompt} tokens, {options.new_tokens} new "
        f"ones; gamma {drafts}, window {options.window}; prompts are read within the time\n"
        "medians of rounds (lowest to highest)"
    )
    for title in ("clients", "tokens/s", "ratio", "first token ms", "ms a token", "acceptance length"):
        table.add_column(title, justify="right")
    for result in results:
        table.add_row(
            str(result.clients),
            spread(result.tokens_per_second, 1),
            f"{result.tokens_per_second.median / results[0].tokens_per_second.median:.2f}",
            spread(result.first_token_ms, 1),
            spread(result.token_ms, 2),
            f"{result.acceptance_length:.2f}",
        )
    return table


def first_token_table(result: FirstToken) -> Table:
    """One line."""
    table = Table(caption=f"a prompt of {result.short} tokens, alone and while one of {result.long} is read")
    for title in ("first token alone ms", "beside the long one ms", "a chunk of the long one ms"):
        table.add_column(title, justify="right")
    table.add_row(spread(result.idle_ms, 1), spread(result.beside_ms, 1), f"{result.chunk_ms:.1f}")
    return table
