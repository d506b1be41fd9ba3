"""What a server is set up with. Loads neither JAX nor the web framework."""

from dataclasses import dataclass, field
from typing import Literal

from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.errors import UserError
from wmtp_jax.generation.options import require_integer

# Which of a server's ways to draft a request takes.
Draft = Literal["windowed", "native", "none"]


def is_api_key(text: str) -> bool:
    """Whether a header can carry it."""
    return bool(text) and text.isascii() and text.isprintable()


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where a server listens, what it calls its model, and what it refuses.

    - ``host``, ``port``: loopback by default; 0 is a free port.
    - ``name``: of the model, as requests give it.
    - ``api_key``: what requests must bring as a bearer token; None asks for nothing.
    - ``body_bytes``: of a request's body, at most.
    - ``choices``: prompts times ``n`` of one request, at most.
    - ``grace``: seconds that running requests have to come to their end when the server is told to stop.
    - ``compare``: the page may have the same prompt drafted without a window, by a second engine of one row that is
      made when it is first asked for.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "demo"
    api_key: str | None = field(default=None, repr=False)
    body_bytes: int = 8 * 2**20
    choices: int = 16
    grace: float = 30.0
    compare: bool = True
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        require_integer("port", self.port, 0, 2**16 - 1)
        require_integer("body_bytes", self.body_bytes, 1)
        require_integer("choices", self.choices, 1)
        if not 0 <= self.grace < float("inf"):
            raise UserError(f"grace={self.grace}: must be a number of seconds, 0 or more")
        if not self.name:
            raise UserError("name: must be text of at least one character")
        if self.api_key is not None and not is_api_key(self.api_key):
            raise UserError("api_key: must be printable ASCII text of at least one character")
