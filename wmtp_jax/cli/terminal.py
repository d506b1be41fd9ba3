"""Text and progress on a terminal."""

import contextlib
import unicodedata
from collections.abc import Callable, Iterator

from wmtp_jax.generation.options import GenerateOptions

# A bar that is gone at once only flickers.
_CHUNKS_WORTH_A_BAR = 4


def safe_for_terminal(text: str) -> str:
    """Model output with control characters escaped, all but newline and tab: text must not steer the terminal."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


@contextlib.contextmanager
def prompt_progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error for long prompts; None where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = ("reading the prompt", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("prompt", total=None)

    def update(done: int, total: int) -> None:
        if total > _CHUNKS_WORTH_A_BAR * GenerateOptions.chunk:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()
