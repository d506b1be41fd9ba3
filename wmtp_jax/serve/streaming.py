"""Server-sent events, and clients that go away."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wmtp_jax.serve.answers import to_json

T = TypeVar("T")
_END = b"data: [DONE]\n\n"


class Gone(Exception):
    """The client has closed the connection."""


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of ``work``, which is cancelled when the client goes: then raises Gone."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


class EventStream(Response):
    """A body of events, one JSON object each, and a last one that says so."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[BaseModel, None]):
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with contextlib.suppress(Gone):
            await unless_gone(self._write(send), receive)

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for body in events:
                line = b"data: " + json.dumps(to_json(body), ensure_ascii=False).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": _END, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
