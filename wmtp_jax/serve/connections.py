"""Connections that ask for nothing are not kept for ever."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

# For the first byte of a request to the last of its header; between requests uvicorn waits five.
HEADER_SECONDS = 30.0


class Connection(H11Protocol):
    """Closed where no request has begun for so long; a body is the application's to wait for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._look_again(self.cycle)

    def _look_again(self, seen: object) -> None:
        self.loop.call_later(HEADER_SECONDS / 2, self._look, seen, False)

    def _look(self, seen: object, waited: bool) -> None:
        if self.transport.is_closing():
            return
        resting = self.cycle is None or self.cycle.response_complete
        if not resting or self.cycle is not seen:
            self._look_again(self.cycle)
        elif waited:
            self.transport.close()
        else:
            self.loop.call_later(HEADER_SECONDS / 2, self._look, seen, True)
