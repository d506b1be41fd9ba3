"""Downloads by hub id, against a server on this machine that speaks the hub's protocol."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax.numpy as jnp
import pytest

from checkpoints_convert import load_hf
from tests.checkpoints_convert.folders import assert_same_model, write_kind
from wmtp_jax.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_ID = "Someone/Tiny-Qwen3.5"
COMMAND = "from wmtp_jax.cli.main import main; main()"


class Hub(BaseHTTPRequestHandler):
    """Model information and files of one repository, ``server.folder``; every request path is noted."""

    server: "HubServer"

    def do_GET(self):
        self._answer(with_body=True)

    def do_HEAD(self):
        self._answer(with_body=False)

    def _answer(self, with_body):
        self.server.requests.append(self.path)
        path = self.path.split("?")[0]
        files = self.server.folder.rglob("*")
        names = sorted(str(f.relative_to(self.server.folder)) for f in files if f.is_file())
        if path.startswith(f"/api/models/{HUB_ID}/revision/"):
            info = {"id": HUB_ID, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self._send(json.dumps(info).encode(), with_body, {"Content-Type": "application/json"})
        elif path == f"/api/models/{HUB_ID}/tree/{COMMIT}":
            sizes = {name: (self.server.folder / name).stat().st_size for name in names}
            listed = [{"type": "file", "path": name, "size": size, "oid": "0"} for name, size in sizes.items()]
            self._send(json.dumps(listed).encode(), with_body, {"Content-Type": "application/json"})
        elif path.startswith(f"/{HUB_ID}/resolve/{COMMIT}/") and path.split(f"{COMMIT}/")[1] in names:
            content = (self.server.folder / path.split(f"{COMMIT}/")[1]).read_bytes()
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._send(content, with_body, {"ETag": etag, "X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content, with_body, headers):
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


class HubServer(ThreadingHTTPServer):
    folder: Path
    requests: list[str]


@pytest.fixture
def hub(tmp_path):
    server = HubServer(("127.0.0.1", 0), Hub)
    server.folder, server.requests = write_kind(tmp_path / "repository", "dense", shards=2), []
    for name, text in {"chat_template.jinja": "x", "README.md": "x", "original/a.json": "{}", "x.bin": "x"}.items():
        (server.folder / name).parent.mkdir(exist_ok=True)
        (server.folder / name).write_text(text)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def wmtp(tmp_path, port, *arguments):
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **own, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)


def test_a_hub_id_is_downloaded_and_converted(tmp_path, hub):
    done = wmtp(tmp_path, hub.server_port, "convert", HUB_ID, "out", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == HUB_ID
    direct = load_hf(hub.folder, dtype=jnp.bfloat16)[1]
    assert_same_model(load_checkpoint(tmp_path / "out", dtype=jnp.bfloat16)[1], direct)
    assert (tmp_path / "out/chat_template.jinja").is_file()
    fetched = {path.split(f"{COMMIT}/")[1] for path in hub.requests if f"resolve/{COMMIT}/" in path}
    assert "config.json" in fetched
    assert not fetched & {"README.md", "x.bin", "original/a.json"}


def test_an_unknown_hub_id_is_one_clear_line(tmp_path, hub):
    failed = wmtp(tmp_path, hub.server_port, "convert", "Someone/Else", "out")
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr == "wmtp: Someone/Else: neither a local folder nor a model on the hub\n"


def test_no_network_is_one_clear_line(tmp_path):
    failed = wmtp(tmp_path, 9, "inspect", HUB_ID)
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.count("\n") == 1
    assert failed.stderr.startswith(f"wmtp: {HUB_ID}: no such local folder, and the hub cannot be reached")
