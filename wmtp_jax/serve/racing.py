"""Waiting for one thing unless another comes first."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def unless(event: asyncio.Event, wanted: Awaitable[T], seconds: float | None = None) -> T | None:
    """What is wanted, or None where the event is set first; what has come already counts before it.

    Raises TimeoutError after so many seconds. What is not waited for any more is cancelled.
    """
    coming, other = asyncio.ensure_future(wanted), asyncio.ensure_future(event.wait())
    try:
        done, _ = await asyncio.wait({coming, other}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if coming in done:
            return coming.result()
        if other in done:
            return None
        raise TimeoutError
    finally:
        for task in (coming, other):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
