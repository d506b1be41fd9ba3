"""Whatever schemathesis makes of the published document is answered as the document says, and never with a 500."""

import json
from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.serving import NAME, assert_idle, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server():
    with serving(body_bytes=200_000) as running:
        yield running
        assert_idle(running)


POSTS = [("POST", "/v1/completions"), ("POST", "/v1/chat/completions")]
GETS = [("GET", path) for path in ("/v1/models", "/v1/models/{name}", "/health", "/metrics")]
FITTING, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "method", "path"), [(FITTING, *one) for one in POSTS + GETS] + [(WRONG, *one) for one in POSTS]
)
def test_answers_are_as_the_document_says(server, mode, method, path):
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]
    checks = CHECKS if mode is FITTING else [*CHECKS, negative_data_rejection]
    seen: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=100, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def check(case) -> None:
        if method == "POST" and mode is FITTING:
            # Else hardly anything gets past the model's name; and a text of the whole context costs its time.
            case.body["model"] = NAME
            case.body["max_tokens"] = min(case.body.get("max_tokens") or 3, 3)
            if isinstance(case.body.get("prompt"), str):
                # Few characters are in the model's vocabulary, and the others make an empty prompt.
                case.body["prompt"] += "ab"
        response = case.call(timeout=120)
        seen[response.status_code] += 1
        case.validate_response(response, checks=checks)
        if response.status_code >= 400:
            assert json.loads(response.content)["error"]["message"]

    check()
    if mode is WRONG:
        assert set(seen) <= {400, 404, 405, 413}
    elif "{name}" not in path:
        assert seen[200] > (20 if method == "POST" else 0)
    assert httpx.get(server.url + "/health").status_code == 200
