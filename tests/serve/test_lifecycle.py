"""Keys, full queues, clients that leave, failures of the device, and the server's end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

import wmtp_jax as wmtp
from tests.serve.serving import NAME, assert_idle, serving, wait_until
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.engine.slots import Slots
from wmtp_jax.serve.options import ServeOptions
from wmtp_jax.serve.server import listen
from wmtp_jax.serve.service import Service

# Long enough to be caught running, with one step a turn.
SLOW = EngineOptions(rows=2, context=4096, page_size=256, chunk=16, gamma=0, window=0, steps=1, queue=2)
LONG = dict(prompt="a", max_tokens=4000, ignore_eos=True)


@contextmanager
def streamed(url: str, **body):
    with httpx.stream("POST", url + "/v1/completions", json={"model": NAME, "stream": True, **body}, timeout=60) as it:
        yield it


def events_of(response) -> list:
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def test_the_key_is_asked_for_where_the_api_begins():
    with serving(api_key="s3cret") as server:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "s3cret"}, 401),
            ({"Authorization": b"Bearer \xff\xfe"}, 401),
            ({"Authorization": "Bearer s3cret"}, 200),
            ({"Authorization": "bearer s3cret"}, 200),
        ):
            response = httpx.get(server.url + "/v1/models", headers=headers)
            assert response.status_code == status, headers
            if status == 401:
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert server.post(prompt="a").status_code == 401
        assert httpx.get(server.url + "/v1/other").status_code == 401
        for open_path in ("/health", "/metrics", "/"):
            assert httpx.get(server.url + open_path).status_code == 200
        assert "s3cret" not in repr(server.service.options)


def test_a_full_queue_is_429_and_later_there_is_room():
    with serving(SLOW) as server:
        with streamed(server.url, n=4, **LONG) as running:
            next(running.iter_lines())
            full = server.post(prompt="a", max_tokens=1)
            assert full.status_code == 429
            assert full.headers["retry-after"]
            assert full.json()["error"]["type"] == "rate_limit_error"
            # Two fit where one does not: neither may stay.
            assert server.post(prompt="a", n=2, max_tokens=1).status_code == 429
        assert_idle(server)
        assert server.post(prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(stream):
    with serving(SLOW) as server:
        body = json.dumps({"model": NAME, "stream": stream, "n": 3, **LONG}).encode()
        address = re.fullmatch(r"http://(.*):(\d+)", server.url)
        with socket.create_connection((address[1], int(address[2]))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            wait_until(lambda: server.service.engine.meter.running == 2)
        assert_idle(server)
        assert server.service.engine.meter.finished == 0


def test_a_reader_that_does_not_read_holds_no_row():
    with serving() as server, streamed(server.url, prompt="a", max_tokens=50, ignore_eos=True) as lazy:
        assert_idle(server)
        assert server.post(prompt="b", max_tokens=3).status_code == 200
        assert events_of(lazy)[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
def test_a_failed_step_is_told_and_the_next_request_is_served(monkeypatch, stream):
    run, broken = Slots.run, threading.Event()

    def failing(*arguments, **given):
        if broken.is_set():
            broken.clear()
            raise RuntimeError("out of memory")
        return run(*arguments, **given)

    monkeypatch.setattr(Slots, "run", failing)
    with serving() as server:
        broken.set()
        if stream:
            with streamed(server.url, prompt="a", max_tokens=30, ignore_eos=True) as response:
                assert response.status_code == 200
                *_, failure, end = events_of(response)
            assert end == "[DONE]"
            told = json.loads(failure)["error"]
        else:
            response = server.post(prompt="a", max_tokens=30, ignore_eos=True)
            assert response.status_code == 500
            told = response.json()["error"]
        assert "out of memory" in told["message"]
        assert told["type"] == "server_error"
        assert server.post(prompt="a", max_tokens=3).status_code == 200
        assert_idle(server)


@pytest.mark.parametrize("stream", [True, False])
def test_told_to_stop_it_lets_requests_end(stream):
    got = {}
    with serving() as server:

        def ask() -> None:
            got["response"] = server.post(prompt="a", max_tokens=55, ignore_eos=True, stream=stream)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: server.service.engine.meter.running == 1)
        server.stop()
        asking.join(30)
    reason = '"finish_reason": "length"' if stream else '"finish_reason":"length"'
    assert reason in got["response"].text
    if not stream:
        assert got["response"].json()["usage"]["completion_tokens"] == 55


@pytest.mark.parametrize("stream", [True, False])
def test_what_does_not_end_in_time_is_returned_as_far_as_it_is(stream):
    got = {}
    with serving(SLOW, grace=0.5) as server:

        def ask(name: str, number: int) -> None:
            got[name] = server.post(n=number, stream=stream, **LONG)

        asking = [threading.Thread(target=ask, args=("running", 2)), threading.Thread(target=ask, args=("queued", 1))]
        asking[0].start()
        wait_until(lambda: server.service.engine.meter.emitted_tokens > 20)
        asking[1].start()
        wait_until(lambda: server.service.engine.meter.waiting == 1)
        begin = time.monotonic()
        server.stop()
        for thread in asking:
            thread.join(30)
            assert not thread.is_alive()
        server.thread.join(30)
        assert time.monotonic() - begin < 15
    response, queued = got["running"], got["queued"]
    assert response.status_code == 200
    if stream:
        parts = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        reasons = [choice["finish_reason"] for part in parts for choice in part["choices"]]
        assert [reason for reason in reasons if reason] == ["length"] * 2
        assert response.text.endswith("data: [DONE]\n\n")
        assert "the server is stopping" in queued.text
        assert queued.text.endswith("data: [DONE]\n\n")
    else:
        assert [choice["finish_reason"] for choice in response.json()["choices"]] == ["length"] * 2
        assert 20 < response.json()["usage"]["completion_tokens"] < 8000
        assert queued.status_code == 503


def raw_connection(server) -> socket.socket:
    host, port = re.fullmatch(r"http://(.*):(\d+)", server.url).groups()
    return socket.create_connection((host, int(port)), timeout=30)


HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


def test_a_stop_does_not_wait_for_bodies_that_do_not_come(caplog):
    with serving(grace=20.0) as server, raw_connection(server) as half:
        half.sendall(HALF)
        wait_until(lambda: server.server.server_state.tasks)
        begin = time.monotonic()
        server.stop()
        assert half.recv(20) == b"HTTP/1.1 503 Service"
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert time.monotonic() - begin < 5
    assert not caplog.records


def test_a_stop_does_not_wait_for_ever_for_who_does_not_read(monkeypatch, caplog):
    monkeypatch.setattr("wmtp_jax.serve.server._LAST_SECONDS", 0.3)
    with serving(SLOW, grace=0.5) as server, raw_connection(server) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        body = json.dumps({"model": NAME, "stream": True, "logprobs": 5, "n": 2, **LONG}).encode()
        slow.sendall(HALF[:-1].replace(b"100", b"%d" % len(body)) + body)
        wait_until(lambda: server.service.engine.meter.emitted_tokens > 1500)
        begin = time.monotonic()
        server.stop()
        server.thread.join(15)
        assert not server.thread.is_alive()
        assert time.monotonic() - begin < 6
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stop_does_not_wait_for_the_engine_that_compares(monkeypatch):
    compiling = threading.Event()

    def compile_for_long(service):
        compiling.set()
        time.sleep(4)
        raise AssertionError("nobody asks for it any more")

    monkeypatch.setattr(Service, "_make_native", compile_for_long)
    got = {}
    with serving(grace=0.5) as server:
        asking = threading.Thread(target=lambda: got.update(answer=server.post(prompt="a", draft="native")))
        asking.start()
        assert compiling.wait(30)
        begin = time.monotonic()
        server.stop()
        asking.join(10)
        assert time.monotonic() - begin < 3
    assert got["answer"].status_code == 503
    assert got["answer"].json()["error"]["message"] == "the server is stopping"


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HALF[:40]])
def test_a_connection_that_asks_for_nothing_is_closed(monkeypatch, sent):
    monkeypatch.setattr("wmtp_jax.serve.connections.HEADER_SECONDS", 0.4)
    with serving() as server, raw_connection(server) as idle, raw_connection(server) as body:
        # What is being asked for is waited for: half a body is no idle connection.
        body.sendall(HALF)
        idle.sendall(sent)
        assert idle.recv(1) == b""
        body.settimeout(1.5)
        with pytest.raises(TimeoutError):
            body.recv(1)


def test_metrics_count_what_happens():
    with serving() as server:
        server.post(prompt="abc", max_tokens=20, temperature=0, ignore_eos=True)
        server.post(prompt="abc", n="x")
        for path in ("/a", "/b", "/v1/models/x"):
            httpx.get(server.url + path)
        response = httpx.get(server.url + "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    meter = server.service.engine.meter
    assert float(values["wmtp_output_tokens_total"]) == 1 + meter.emitted_tokens == 20
    assert float(values["wmtp_acceptance_length_count"]) == meter.steps > 0
    assert float(values["wmtp_acceptance_length_sum"]) == 19
    assert float(values['wmtp_acceptance{position="1"}']) == pytest.approx(meter.acceptance_by_position[0])
    assert float(values["wmtp_time_to_first_token_seconds_count"]) == 1
    assert float(values["wmtp_time_per_output_token_seconds_count"]) == 1
    assert float(values["wmtp_prompt_tokens_total"]) == 3
    assert float(values["wmtp_running"]) == 0
    assert float(values["wmtp_pages"]) == float(values["wmtp_free_pages"]) == 12
    assert float(values['wmtp_requests_total{path="/v1/completions",status="200"}']) == 1
    assert float(values['wmtp_requests_total{path="/v1/completions",status="400"}']) == 1
    assert float(values['wmtp_requests_total{path="other",status="404"}']) == 3


def test_health_and_openapi():
    with serving() as server:
        assert httpx.get(server.url + "/health").json() == {"status": "ok"}
        document = httpx.get(server.url + "/openapi.json").json()
        assert "422" not in document["paths"]["/v1/completions"]["post"]["responses"]
        server.service.stopping = True
        assert httpx.get(server.url + "/health").status_code == 503


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(port=70000), "port=70000"),
        (dict(grace=-1), "grace=-1"),
        (dict(name=""), "name: must be text"),
        (dict(api_key=""), "api_key: must be printable ASCII"),
        (dict(api_key="a\nb"), "api_key: must be printable ASCII"),
        (dict(body_bytes=0), "body_bytes=0"),
    ],
)
def test_bad_options_get_one_line(options, message):
    with pytest.raises(wmtp.UserError, match=message):
        ServeOptions(**options)


def test_an_address_that_cannot_be_had_is_named():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(wmtp.UserError, match=f"127.0.0.1, port {port}: Address already in use; give another"):
            listen("127.0.0.1", port)
    with pytest.raises(wmtp.UserError, match=r"--host no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_the_demo_and_stops_by_signal(tmp_path, stop):
    key = tmp_path / "key"
    key.write_text("abc\n")
    command = [sys.executable, "-m", "wmtp_jax", "serve", "--port", "0", "--rows", "1", "--api-key-file", str(key)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "serving demo at" in line:
                break
        url = lines[-1].split()[-1]
        given = dict(model="demo", prompt="The President shall", max_tokens=12, temperature=0)
        headers = {"Authorization": "Bearer abc"}
        response = httpx.post(url + "/v1/completions", json=given, headers=headers, timeout=60)
        expected = wmtp.generate(wmtp.load(), "The President shall", max_new_tokens=12, gamma=0).text[0]
        assert response.json()["choices"][0]["text"] == expected
        process.send_signal(stop)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
