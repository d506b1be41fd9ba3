"""What is wrong with a request is told by its field, and never reaches the engine."""

from collections.abc import Iterator

import httpx
import pytest
from pydantic import ValidationError

from tests.serve.serving import NAME, Serving, assert_idle, serving
from wmtp_jax.serve.schema import CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(choices=5, body_bytes=100_000) as running:
        yield running
        assert_idle(running)


# A field, and values that it cannot have; of both kinds of completion unless it is in only one.
SHARED = {
    "model": [3, None, ["tiny"]],
    "max_tokens": [-1, 1.5, "3", True, 2**40, [1]],
    "n": [0, 129, 1.0, "1", True],
    "stream": [1, "true", []],
    "stream_options": [True, {"include_usage": 1}, {"other": True}],
    "stop": ["", [""], [1], 3, ["a"] * 17],
    "seed": [-1, 2**32, 1.5, "1", True],
    "temperature": [-0.1, 2.1, "1", True, [0.5]],
    "top_p": [0, 1e-44, -0.5, 1.1, "1"],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1, {}],
    "top_k": [-1, 1.5, 2**31],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, 1e-300, 101, -1, "1"],
    "ignore_eos": [1, "no"],
    "gamma": [-1, 4, 9, "3", True],
    "draft": ["other", 3],
    "draft_details": [1],
    "user": [3],
    "metadata": [{"a": 1}, "a", {f"a{n}": "b" for n in range(65)}, dict.fromkeys(map(str, range(9000)), 1)],
    "response_format": [
        "json",
        {},
        {"type": "other"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objec"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}},
        {"type": "regex", "regex": "("},
        {"type": "regex", "regex": ""},
    ],
    "tools": [[{"type": "function"}], {}],
    "tool_choice": ["required", {"type": "function"}],
    "parallel_tool_calls": [1],
    "logit_bias": [{"1": 5}],
}
OWN = {
    TEXT: {
        "prompt": [
            None,
            "",
            [],
            {},
            3,
            [[]],
            ["a", 3],
            [1.5],
            [True],
            [-1],
            [43],
            [[1], [43]],
            ["a"] * 6,
            "a" * 200,
            "a" * 90_000,
            ["a", ""],
            [-1] * 20_000,
            [0.5] * 20_000,
            [[]] * 20_000,
            ["a"] * 19_000 + [1],
        ],
        "logprobs": [-1, 6, True, "3"],
        "echo": [True],
        "suffix": ["a"],
        "best_of": [2],
    },
    CHAT: {
        "messages": [
            None,
            [],
            "a",
            [{}],
            [{"role": "tool", "content": "a"}],
            [{"role": "user"}],
            [{"role": "user", "content": 3}],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
            [{"role": "user", "content": "a", "more": 1}],
            [{"role": "assistant", "content": "a", "tool_calls": [{"id": "a"}]}],
            [{"role": "assistant", "content": "a", "refusal": "no"}],
            [1] * 20_000,
            [{"role": "user", "content": "a" * 200}],
        ],
        "logprobs": [1, "yes"],
        "top_logprobs": [-1, 21, 3],
        "max_completion_tokens": [-1, 1.5],
        "chat_template_kwargs": [3, []],
        "functions": [[]],
    },
}
FIELDS = [(path, name) for path, own in OWN.items() for name in [*SHARED, *own]]


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_every_field_is_named_when_it_is_wrong(server, path, name):
    for value in OWN[path].get(name, SHARED.get(name, [])):
        body = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
        body |= {"max_tokens": 2, name: value}
        response = server.post(path, **body)
        told = response.json()["error"]
        assert response.status_code == 400, (value, response.text)
        assert told["param"] == name, (value, told)
        assert told["type"] == "invalid_request_error"
        assert told["message"]
        assert "\n" not in told["message"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_null_is_a_fields_default(server, path):
    body = {"prompt": "a"} if path == TEXT else {"messages": [{"role": "user", "content": "a"}]}
    nothing = {name: None for name in [*SHARED, *OWN[path]] if name != "model"}
    nothing = {name: None for name in nothing if name not in ("suffix", "functions", "prompt", "messages")}
    response = server.post(path, **{**nothing, **body, "max_tokens": 2})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ("a" * 10, 51, "this engine holds 64 a request"),
        ("a" * 61, 1, "this engine holds 64 a request"),
        ("a", 10**6, "this engine holds 64 a request: shorten the prompt or lower max_tokens"),
        (["a", "a" * 70], 1, "prompt 1's 70 tokens"),
        ("a" * 70, 1, "the prompt's 70 tokens"),
        ("a" * 90_000, 1, "the prompt's 90000 characters are too many"),
    ],
)
def test_too_long_names_the_limit(server, prompt, new, message):
    response = server.post(prompt=prompt, max_tokens=new)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_chat_that_fills_the_context_is_too_long(server):
    for length in (56, 57, 58, 59, 70):
        response = server.post(CHAT, messages=[{"role": "user", "content": "a" * length}], ignore_eos=True)
        # "u:", the text and "," leave a token of 60 to write, or none.
        assert response.status_code == (200 if length + 3 < 60 else 400), (length, response.text)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", "application/json", "the body must be a JSON object"),
        (b"{", "application/json", "the body is not JSON"),
        (b"\xff\xfe", "application/json", "the body is not JSON"),
        (b'"\xff\xfe"', "application/json", "the body cannot be read as JSON"),
        (b"[" * 50_000, "application/json", "the body cannot be read as JSON"),
        (b"[1]", "application/json", "the body must be a JSON object"),
        (b"null", "application/json", ""),
        (b'{"model": "tiny", "prompt": "a"}', "text/plain", "the body must be a JSON object, sent as application/json"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "application/json", "prompt"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "application/json", "temperature"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "application/json", "temperature"),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", "application/json", ""),
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(server, content, kind, message):
    response = httpx.post(server.url + TEXT, content=content, headers={"content-type": kind}, timeout=60)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there(server):
    for method, path, status in (
        ("GET", "/v1/other", 404),
        ("GET", TEXT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/a/b", 404),
    ):
        response = httpx.request(method, server.url + path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_bodies_larger_than_the_limit_are_not_read(server):
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b" " * 65_536

    large = httpx.post(server.url + TEXT, json={"model": NAME, "prompt": "a" * 100_001})
    assert large.status_code == 413
    assert "larger than 100000 bytes" in large.json()["error"]["message"]
    try:
        # Chunked: its length is not known before it is read.
        response = httpx.post(server.url + TEXT, content=endless(), headers={"content-type": "application/json"})
        assert response.status_code == 413
    except httpx.TransportError:
        # The server hung up while the client was still sending.
        pass
    assert server.post(prompt="a", max_tokens=2).status_code == 200


def test_a_failed_answer_of_a_template_is_the_requests_fault(server):
    response = server.post(
        CHAT, messages=[{"role": "user", "content": "a"}], chat_template_kwargs={"ending": ["a"] * 3}, max_tokens=1
    )
    assert response.status_code == 200
    assert server.post(CHAT, messages=[{"role": "user", "content": "~"}], max_tokens=1).status_code == 200


def test_places_in_a_format_are_told_as_they_were_sent(server):
    for form, message in (
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema: field required"),
        ({"type": "regex", "regex": ""}, "response_format.regex: string should have at least 1 character"),
        ({"type": "regex", "regex": r"[^\s\S]"}, "no text fits it"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, "no text fits it"),
    ):
        assert message in server.post(prompt="a", response_format=form).json()["error"]["message"]


def test_wrong_items_are_not_told_one_by_one():
    """A body of megabytes whose every item is wrong is refused by its first, whatever a prompt can be."""
    for prompt in ([-1] * 10**6, [0.5] * 10**6, [[]] * 10**6):
        with pytest.raises(ValidationError) as caught:
            CompletionRequest.model_validate({"model": NAME, "prompt": prompt})
        assert caught.value.error_count() < 10


def test_a_body_of_too_many_fields_is_refused_as_a_whole(server):
    response = server.post(prompt="a", **{f"a{n}": 1 for n in range(5000)})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the body has more than 64 entries"


def test_an_answer_can_be_handed_back_as_it_came(server):
    first = server.post(CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=2).json()
    nothing = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls"))
    turns = [
        {"role": "user", "content": "a"},
        {**nothing, "annotations": [], **first["choices"][0]["message"]},
        {"role": "user", "content": "b"},
    ]
    extra = dict(tools=[], tool_choice="none", parallel_tool_calls=False, logit_bias={})
    assert server.post(CHAT, messages=turns, max_tokens=2, **extra).status_code == 200
