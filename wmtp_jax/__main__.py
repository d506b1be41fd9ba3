"""The `wmtp` process: an interrupt ends it with exit code 130 and one line, whenever it comes."""

import os
import signal
from types import FrameType


def main() -> None:
    """Runs this process's command line and exits with its code."""
    # A shell that starts a command in the background may have it ignore interrupts.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from wmtp_jax.cli.main import main as command_line

        command_line()
    except KeyboardInterrupt:
        _end()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, but not where it would be lost.

    An extension module that is interrupted while it is imported crashes or reports something else, and what is raised
    in JAX's garbage collection is ignored.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name == "_xla_gc_callback":
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end() -> None:
    try:
        os.write(2, b"wmtp: interrupted\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    main()
