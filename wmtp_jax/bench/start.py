"""Time from `wmtp generate` to its first text, cold and warm, and the memory of the whole run.

Cold is a process that finds an empty compilation cache; warm is one that finds what the cold one left there. The
operating system's file cache and Python's byte code are warm in both. Before the runs this process must load no
weights: the peak memory that the system tells of a child begins at that of the process it was split from.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wmtp_jax.bench.options import StartOptions
from wmtp_jax.errors import UserError

_MAIN = "from wmtp_jax.cli.main import main; main()"
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process: seconds from its start to the first byte of text and to its end, and its peak resident memory."""

    first_text_seconds: float
    end_seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class StartResult:
    """A prompt's runs. ``context`` counts the prompt's tokens as `wmtp generate` reads them."""

    context: int
    cold: Run
    warm: list[Run]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a run must hold: ``weights_bytes`` as loaded, ``caches_bytes`` of target, recurrent layers and draft."""

    weights_bytes: int
    caches_bytes: int

    def rest(self, peak_bytes: int) -> int:
        """Peak memory beyond weights and caches: the interpreter, JAX, its compiler, and work space."""
        return peak_bytes - self.weights_bytes - self.caches_bytes


def measure_starts(
    model: str, prompts: Sequence[tuple[str, int]], options: StartOptions, note: Callable[[str], None]
) -> list[StartResult]:
    """Runs each (prompt, its tokens) once with an empty compilation cache, then ``repeats`` times with a full one.

    Raises UserError with the command's own message where it fails, and on systems without `wait4`.
    """
    if not hasattr(os, "wait4"):
        raise UserError("this system does not tell the peak memory of a process: run it on Linux or macOS")
    results = []
    for prompt, tokens in prompts:
        with tempfile.TemporaryDirectory(prefix="wmtp-bench-") as scratch:
            file = Path(scratch, "prompt.txt")
            file.write_bytes(prompt.encode())
            command = [sys.executable, "-c", _MAIN, *_arguments(model, file, options)]
            environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(Path(scratch, "programs"))}
            note(f"{tokens} tokens: cold")
            cold = run_once(command, environment)
            warm = []
            for index in range(options.repeats):
                note(f"{tokens} tokens: warm, {index + 1} of {options.repeats}")
                warm.append(run_once(command, environment))
        results.append(StartResult(context=tokens, cold=cold, warm=warm))
    return results


def _arguments(model: str, prompt: Path, options: StartOptions) -> list[str]:
    return [
        *("generate", "--model", model, "--prompt-file", str(prompt), "--ignore-eos"),
        *("--max-new-tokens", str(options.new_tokens), "--gamma", str(options.gamma)),
        *("--window", str(options.window), "--sink", str(options.sink if options.window else 0)),
    ]


def run_once(command: Sequence[str], environment: dict[str, str]) -> Run:
    """Runs a command to its end. Raises UserError, with the last line of its standard error, where it fails."""
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        with process.stdout as out:
            begun = out.read(1)
            first = time.perf_counter() - begin
            out.read()
        # Of one child alone; `getrusage` would give the largest of all children.
        _, status, usage = os.wait4(process.pid, 0)
        end = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines() or ["it printed nothing"]
    if process.returncode or not begun:
        raise UserError(f"`wmtp generate` ended with code {process.returncode}: {lines[-1]}")
    return Run(first_text_seconds=first, end_seconds=end, peak_bytes=usage.ru_maxrss * _MAXRSS_BYTES)
