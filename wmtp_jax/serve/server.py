"""Runs the application until it is told to stop, and lets what runs come to its end."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from wmtp_jax.errors import UserError
from wmtp_jax.model import Model
from wmtp_jax.serve.app import make_app
from wmtp_jax.serve.connections import Connection
from wmtp_jax.serve.options import ServeOptions
from wmtp_jax.serve.service import Service

# For answers that were cut short to be sent.
_LAST_SECONDS = 2.0


class Server(uvicorn.Server):
    """Told to stop (SIGINT, SIGTERM), it takes no more connections and gives running requests ``grace`` seconds.

    Those that are not at their end by then are answered with what they have. Told twice, it does not wait.
    """

    def __init__(self, service: Service):
        grace = service.options.grace
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_config=None,
                access_log=False,
                server_header=False,
                http=Connection,
                # Answers that were cut short are still to be sent.
                timeout_graceful_shutdown=int(grace + _LAST_SECONDS) + 10,
            )
        )
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal of either kind stops, the second does not wait."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Without raising them again at the end: a stop that was asked for is no failure."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        cutting = asyncio.create_task(self._cut_short())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cutting
            await self._hang_up()

    async def _cut_short(self) -> None:
        await asyncio.sleep(self._service.options.grace)
        self._service.cut_short()
        await asyncio.sleep(_LAST_SECONDS)
        await self._hang_up()

    async def _hang_up(self) -> None:
        """Lets go of whoever has not taken the answer by now."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=1.0)


def serve(model: Model, options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Serves until a signal. ``ready`` gets the address. Raises UserError where that cannot be had."""
    # First, so that an address that is taken is told before anything is compiled.
    listening = listen(options.host, options.port)
    try:
        with contextlib.closing(Service(model, options)) as service:
            server = Server(service)
            host, port = listening.getsockname()[:2]
            ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            server.run(sockets=[listening])
    finally:
        listening.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise UserError(f"{host}, port {port}: {error.strerror}; give another --host or --port") from None
    return listening
