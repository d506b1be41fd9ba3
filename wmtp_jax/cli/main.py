"""The `wmtp` command: its subcommands, and what every kind of failure prints and exits with.

Exit codes: 0 done, 1 a bug or a reader of the output that went away, 2 bad input, 130 interrupted.
"""

import contextlib
import errno
import io
import os
import platform
import sys
import traceback
from importlib import import_module, metadata
from typing import Annotated

import typer

from pallas_kernels.errors import UnsupportedKernel
from wmtp_jax.cli.output import note
from wmtp_jax.errors import UserError

COMMAND_MODULES = ("generate", "convert", "inspect", "bench", "plan", "train", "serve")
TRACEBACK_VARIABLE = "WMTP_TRACEBACK"


def main() -> None:
    """Runs this process's command line and exits with its code."""
    # A shell can close either stream before the start; Python then has None in its place.
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where the terminal's encoding lacks a character of the text, a question mark beats a failure.
        sys.stdout.reconfigure(errors="replace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        code = code or 1
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; a failure prints one line on standard error."""
    try:
        return _dispatch(arguments or ["--help"])
    except (UserError, UnsupportedKernel) as error:
        return _fail(str(error), 2)
    except typer.TyperException as error:
        return _fail(_usage_message(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except OSError as error:
        return _operating_system_failure(error)
    except Exception as error:
        return _bug(error)


def build_app() -> typer.Typer:
    """The application with every subcommand. Loads neither JAX nor a model, so that help is quick."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_global_options)
    for name in COMMAND_MODULES:
        import_module(f"wmtp_jax.cli.{name}").register(app)
    return app


def _dispatch(arguments: list[str]) -> int:
    command = typer.main.get_command(build_app())
    try:
        code = command.main(arguments, prog_name="wmtp", standalone_mode=False)
    except SystemExit as done:
        # Typer leaves this way, against its own rule, when a pipe closes.
        _discard_output()
        code = done.code
    if code == 130:
        # What Typer makes of an interrupt.
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _print_versions(wanted: bool) -> None:
    if wanted:
        parts = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax"))
        print(f"wmtp {metadata.version('wmtp-jax')} ({parts}, Python {platform.python_version()})")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions and exit.", is_eager=True, callback=_print_versions)
    ] = False,
) -> None:
    """Lossless speculative decoding for long contexts, on CPU, GPU and TPU."""


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        note(f"wmtp: {message}")
    return code


def _usage_message(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "wmtp"
    return f"{error.format_message().rstrip('.')}; `{command} --help` lists what there is"


def _operating_system_failure(error: OSError) -> int:
    """A missing file, a forbidden folder or a full disk is for the person to mend; anything else is a bug."""
    if isinstance(error, BrokenPipeError):
        _discard_output()
        return 1
    if isinstance(error.filename, str | bytes):
        return _fail(f"{os.fsdecode(error.filename)}: {error.strerror}", 2)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _fail(f"{error.strerror}", 2)
    return _bug(error)


def _bug(error: Exception) -> int:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
        return 1
    lines = str(error).splitlines() or [""]
    what = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
    return _fail(f"internal error: {what} (set {TRACEBACK_VARIABLE}=1 for the traceback)", 1)


def _discard_output() -> None:
    """Points standard output at nothing, so that the interpreter's last flush cannot fail on a closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
