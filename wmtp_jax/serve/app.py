"""The routes of the server."""

from collections.abc import Callable, Coroutine, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from wmtp_jax.serve import errors
from wmtp_jax.serve.answers import ChatCompletion, Completion, ErrorBody, Health, ModelCard, ModelList, to_json
from wmtp_jax.serve.choices import Choice
from wmtp_jax.serve.formats import Format
from wmtp_jax.serve.limits import Limits
from wmtp_jax.serve.schema import ChatRequest, CompletionRequest, GenerationRequest
from wmtp_jax.serve.service import Service
from wmtp_jax.serve.streaming import EventStream, Gone, unless_gone

PAGE = Path(__file__).parent / "page.html"
_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in (
        (400, "A field is wrong, which the message names; or the prompt is too long."),
        (401, "The API key is missing or wrong."),
        (404, "There is no such model."),
        (408, "The body did not come in time."),
        (413, "The body is too large."),
        (429, "Too many requests are waiting."),
        (500, "A step failed on the device."),
        (503, "The server is stopping."),
    )
}
_EVENT = {
    "type": "object",
    "description": "One event of the stream: a chunk of the answer, a failure, or [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_STREAMED = {"content": {"text/event-stream": {"schema": _EVENT}}}
_NOBODY_LEFT = 499
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/")


def make_app(service: Service) -> FastAPI:
    """The application over a service."""
    app = FastAPI(
        title="wmtp",
        version=metadata.version("wmtp-jax"),
        description="Lossless speculative decoding behind the OpenAI API.",
    )
    errors.install(app)
    options = service.options
    app.add_middleware(Limits, body_bytes=options.body_bytes, api_key=options.api_key, stopping=service.told_to_stop)
    app.add_middleware(_Counted, service=service, paths=_PATHS)
    _add_api(app, service)
    _add_pages(app, service)
    # Fields that are wrong are 400 here, as in the API that this one follows.
    app.openapi = _without_422(app.openapi)
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=Completion, responses={200: _STREAMED, **_FAILURES})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues one or several texts."""
        service.require_model(body.model)
        return await _answer(service, service.complete(body), body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses={200: _STREAMED, **_FAILURES})
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a conversation."""
        service.require_model(body.model)
        return await _answer(service, service.chat(body), body, request)

    @app.get("/v1/models", responses={401: _FAILURES[401]})
    async def models() -> ModelList:
        """The one model that is served."""
        return ModelList(data=[service.card()])

    @app.get("/v1/models/{name:path}", responses={401: _FAILURES[401], 404: _FAILURES[404]})
    async def model(name: str) -> ModelCard:
        """What there is to know about it."""
        service.require_model(name)
        return service.card()


def _add_pages(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        """Whether the server takes requests."""
        fine = service.engine.alive and not service.stopping
        return JSONResponse({"status": "ok" if fine else "stopping"}, 200 if fine else 503)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=FileResponse, include_in_schema=False)
    async def page() -> FileResponse:
        """Where a person can try the model."""
        return FileResponse(PAGE, media_type="text/html")


async def _answer(
    service: Service,
    submitting: Coroutine[Any, Any, tuple[Format, list[Choice]]],
    body: GenerationRequest,
    request: Request,
) -> Response:
    try:
        made, choices = await unless_gone(submitting, request.receive)
        if body.stream:
            count = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(service.chunks(made, choices, count=count))
        whole = await unless_gone(service.whole(made, choices), request.receive)
    except Gone:
        return Response(status_code=_NOBODY_LEFT)
    return JSONResponse(to_json(whole))


class _Counted:
    """Counts answers by path and status, and answers what nothing else has.

    Unknown paths count as one: a client must not make metrics grow.
    """

    def __init__(self, app: ASGIApp, *, service: Service, paths: Sequence[str]):
        self._app, self._service, self._paths = app, service, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def counted(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._service.metrics.answered(path, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            if begun:
                raise
            await errors.api_error(error).response()(scope, receive, counted)


def _without_422(openapi: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def document() -> dict[str, Any]:
        made = openapi()
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
        return made

    return document
