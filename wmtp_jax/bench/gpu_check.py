"""`make gpu-check`: the Hopper kernels on the device, in one run of a few minutes that leaves one JSON file.

Every section is a process of its own with a time limit: a kernel that faults poisons its process's device context and
one that waits for ever never returns, and neither may take the other figures along.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

from wmtp_jax.errors import UserError

FILE = "gpu_check.json"
# Correctness first. Seconds a section may take; the run's own limit cuts them short.
SECTIONS = {
    "machine": 60,
    "paged_attention": 100,
    "sink_window_attention": 80,
    "gated_delta_rule": 80,
    "mamba2_ssd": 80,
    "bandwidth": 60,
    "verify_attention": 120,
    "other_kernels": 80,
    "steps_mosaic_gpu": 180,
    "steps_xla": 180,
}
_PRESET = ("--preset", "qwen3_6_35b", "--gamma", "6", "--contexts", "64K,256K,1M", "--repeats", "3")


def main(arguments: list[str] | None = None) -> int:
    """0: all passed; 1: something failed, the file says what; 2: bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m wmtp_jax.bench.gpu_check", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", required=True, type=Path, help=f"folder for {FILE}")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of the whole run")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, kernels interpreted")
    parser.add_argument("--only", help="some of the sections, by name, with commas")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.section:
            return _be_section(options.section, options.dry_run)
        return run(options.out, minutes=options.minutes, dry_run=options.dry_run, only=options.only)
    except UserError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2


def run(out: Path, *, minutes: float = 8.0, dry_run: bool = False, only: str | None = None) -> int:
    """Runs the sections in order and writes ``out/gpu_check.json`` after each.

    Raises UserError for a time limit that is not positive and for an unknown section.
    """
    if not 0 < minutes < math.inf:
        raise UserError(f"--minutes {minutes:g}: give a positive number of minutes")
    names = only.split(",") if only else list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise UserError(f"--only {unknown[0]}: no such section; choose among {', '.join(SECTIONS)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be a folder ({error.strerror})") from None
    deadline = time.monotonic() + 60 * minutes
    report = {"dry_run": dry_run, "sections": {}}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        # A machine that only tries the script out may be slow and busy.
        limit_s = SECTIONS[name] * (5 if dry_run else 1)
        section = _section(name, min(limit_s, deadline - time.monotonic()), dry_run)
        report["sections"][name] = section
        report["shares"] = _shares_of_copy(report["sections"])
        (out / FILE).write_text(json.dumps(report, indent=1))
        for line in _lines(section):
            print(f"  {line}", file=sys.stderr, flush=True)
    failed = [name for name, section in report["sections"].items() if not passed(section)]
    print(f"failed: {', '.join(failed)}" if failed else "all passed", file=sys.stderr)
    return 1 if failed else 0


def passed(section: dict) -> bool:
    """No error, nor a figure outside of its tolerance."""
    return "error" not in section and all(r.get("passed", "error" not in r) for r in section["results"])


def _section(name: str, limit_s: float, dry_run: bool) -> dict:
    if limit_s <= 1:
        return {"error": "the time was up before it began", "results": []}
    start = time.monotonic()
    try:
        results, error = (
            _steps(name, limit_s, dry_run) if name.startswith("steps_") else _measured(name, limit_s, dry_run)
        )
    except Exception as exception:  # One section that cannot even begin leaves the others their turn.
        results, error = [], f"{type(exception).__name__}: {exception}"
    return {"seconds": round(time.monotonic() - start, 1), "results": results} | ({"error": error} if error else {})


def _measured(name: str, limit_s: float, dry_run: bool) -> tuple[list[dict], str | None]:
    """What a section's own process printed, a JSON object a line, up to its end or the limit."""
    command = [sys.executable, "-m", "wmtp_jax.bench.gpu_check", "--section", name, "--out", os.devnull]
    printed, error = _output([*command, *(["--dry-run"] if dry_run else [])], limit_s)
    # A limit can cut the last line short.
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")], error


def _steps(name: str, limit_s: float, dry_run: bool) -> tuple[list[dict], str | None]:
    """`wmtp bench step` of the 35B with some kernels; in a dry run only whether there is such a command."""
    kernels = name.removeprefix("steps_")
    wmtp = [sys.executable, "-c", "import sys; from wmtp_jax.cli.main import main; sys.exit(main())"]
    given = ("--help",) if dry_run else (*_PRESET, "--kernels", kernels, "--json")
    printed, error = _output([*wmtp, "bench", "step", *given], limit_s)
    return ([] if error or dry_run else [json.loads(printed)]), error


def _output(command: list[str], limit_s: float) -> tuple[str, str | None]:
    """Standard output, and what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as expired:
        so_far = expired.stdout or b""
        return so_far.decode() if isinstance(so_far, bytes) else so_far, f"stopped after {limit_s:.0f} s"
    if done.returncode == 0:
        return done.stdout, None
    last = done.stderr.strip().splitlines()[-5:]
    return done.stdout, f"exit status {done.returncode}: " + " | ".join(last)


def _be_section(name: str, dry_run: bool) -> int:
    from wmtp_jax.bench import gpu_sections

    for result in gpu_sections.measure(name, dry_run):
        print(json.dumps(result), flush=True)
    return 0


def _shares_of_copy(sections: dict) -> dict[str, float]:
    """Bytes a second of every attention over those of a device copy."""
    copied = [r["gb_per_s"] for r in sections.get("bandwidth", {}).get("results", []) if r["name"] == "copy"]
    results = sections.get("verify_attention", {}).get("results", [])
    return {r["name"]: r["gb_per_s"] / copied[0] for r in results if copied and "gb_per_s" in r}


def _lines(section: dict) -> list[str]:
    lines = [" ".join(f"{key}={_short(value)}" for key, value in r.items()) for r in section["results"]]
    return [*lines, *([f"error: {section['error']}"] if "error" in section else [])]


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:200]


if __name__ == "__main__":
    sys.exit(main())
