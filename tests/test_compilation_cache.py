"""Programs compiled in one run are loaded in the next."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wmtp_jax import compilation_cache
from wmtp_jax.compilation_cache import user_cache_folder

COMPILE_AND_COUNT = """
import json
from wmtp_jax.compilation_cache import enable_compilation_cache
folder = enable_compilation_cache()
import jax, jax.numpy as jnp
counts = {}
jax.monitoring.register_event_listener(lambda event, **_: counts.update({event: counts.get(event, 0) + 1}))
total = jax.jit(lambda x: jnp.sort(x @ x).sum())(jnp.arange(12.0).reshape(3, 4)[:, :3])
events = {name: counts.get(f"/jax/compilation_cache/cache_{name}", 0) for name in ("hits", "misses")}
print(json.dumps({"folder": folder and str(folder), "total": float(total), **events}))
"""


def run(environment: dict[str, str]) -> tuple[dict, str]:
    """What the program above found in a process whose JAX settings are these alone."""
    inherited = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_AND_COUNT],
        cwd=Path(__file__).resolve().parents[1],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, _ = run({"XDG_CACHE_HOME": str(tmp_path)})
    second, err = run({"XDG_CACHE_HOME": str(tmp_path)})
    assert Path(first["folder"]).is_relative_to(tmp_path / "wmtp")
    assert first["misses"] > 1
    assert (second["misses"], second["hits"]) == (0, first["misses"] + first["hits"])
    assert second["total"] == first["total"]
    assert err == ""


def test_jax_s_own_setting_of_the_folder_wins(tmp_path: Path) -> None:
    own = tmp_path / "own"
    found, _ = run({"XDG_CACHE_HOME": str(tmp_path / "user"), "JAX_COMPILATION_CACHE_DIR": str(own)})
    assert found["folder"] == str(own)
    assert list(own.iterdir())
    assert not (tmp_path / "user").exists()


def test_a_folder_that_cannot_be_written_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found, err = run({"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert (found["folder"], found["hits"], found["misses"]) == (None, 0, 0)
    assert err.count("\n") == 1
    assert str(tmp_path / "file") in err


def test_a_cache_switched_off_stays_off(tmp_path: Path) -> None:
    found, err = run({"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "0"})
    assert (found["folder"], err) == (None, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("system", "expected"),
    [("linux", ".cache/wmtp"), ("darwin", "Library/Caches/wmtp"), ("win32", "AppData/Local/wmtp/cache")],
)
def test_each_platform_has_its_own_place(
    system: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert user_cache_folder() == tmp_path / expected


def test_the_oldest_programs_go_once_all_exceed_the_limit(tmp_path: Path) -> None:
    for age in range(10):
        program = tmp_path / f"{age}-cache"
        program.write_bytes(bytes(100))
        os.utime(program, (1e9 - age, 1e9 - age))
    compilation_cache._trim(tmp_path, limit_bytes=1000)
    assert len(list(tmp_path.iterdir())) == 10
    compilation_cache._trim(tmp_path, limit_bytes=999)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{age}-cache" for age in range(5)]
