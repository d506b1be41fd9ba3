"""What is refused before anything is read into a request: too much, too slowly, or without the key."""

import asyncio
import hmac
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wmtp_jax.serve.errors import ApiError
from wmtp_jax.serve.racing import unless

# Of these paths the API is made; health, metrics and the page are for whoever reaches the server.
_GUARDED = "/v1/"
_BODY_SECONDS = 60.0
_CLOSE = {"Connection": "close"}


class _Read(NamedTuple):
    """A body; None where the client has gone."""

    body: bytes | None


class Limits:
    """Reads a body whole, at most ``body_bytes`` of it, before the application sees the request."""

    def __init__(self, app: ASGIApp, *, body_bytes: int, api_key: str | None, stopping: asyncio.Event):
        self._app, self._stopping = app, stopping
        self._limit = body_bytes
        self._key = None if api_key is None else api_key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check_key(scope["path"], headers.get(b"authorization", b""))
            body = await self._body_in_time(headers.get(b"content-length"), receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)

    def _check_key(self, path: str, given: bytes) -> None:
        if self._key is None or not path.startswith(_GUARDED):
            return
        scheme, _, key = given.partition(b" ")
        if not hmac.compare_digest(key, self._key) or scheme.lower() != b"bearer":
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body_in_time(self, declared: bytes | None, receive: Receive) -> bytes | None:
        """The same; one that is not there when the server is told to stop is not waited for."""
        try:
            read = await unless(self._stopping, self._body(declared, receive), _BODY_SECONDS)
        except TimeoutError:
            raise ApiError(408, f"the body was not sent within {_BODY_SECONDS:g} s", headers=_CLOSE) from None
        if read is None:
            raise ApiError(503, "the server is stopping", kind="server_error", headers=_CLOSE)
        return read.body

    async def _body(self, declared: bytes | None, receive: Receive) -> _Read:
        """The whole body."""
        if declared is not None and declared.isdigit() and int(declared) > self._limit:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return _Read(None)
            part = message.get("body", b"")
            size += len(part)
            if size > self._limit:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return _Read(b"".join(parts))

    def _too_large(self) -> ApiError:
        # What is left of the body is not read: the connection cannot be used again.
        return ApiError(413, f"the body is larger than {self._limit} bytes", headers=_CLOSE)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body first, and then what is received."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
