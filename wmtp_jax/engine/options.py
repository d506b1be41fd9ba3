"""What an engine is set up with, and what one request may say. Loads no JAX."""

from dataclasses import dataclass, fields
from typing import Any

from wmtp_jax.errors import UserError
from wmtp_jax.generation.options import DEFAULT_WINDOW, MAX_GAMMA, GenerateOptions, require_integer

# What belongs to one request; all else of `GenerateOptions` belongs to the engine.
REQUEST_FIELDS = frozenset(
    (
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "ignore_eos",
    )
)

# Past these a number is a slip: a program is compiled for each power of two of rows.
_MOST = {"rows": 2**14, "queue": 2**20}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine shares the machine among requests. None but ``cache_dtype`` changes a text.

    - ``rows``: requests that decode or read at the same time; each has a draft cache and recurrent states.
    - ``context``: positions of the longest request: prompt, new tokens, and ``gamma + 1`` for drafts.
    - ``pages``: of the target's pool, for all rows together; None is enough for ``rows`` requests of ``context``.
    - ``page_size``: positions a page; None is what this machine reads fastest at ``context``.
    - ``chunk``: prompt tokens of one forward pass; it divides ``page_size``. Short prompts take a half, a quarter, ...
    - ``prefill_tokens``: prompt tokens that are read between two looks at the rows that decode, at least a chunk.
    - ``steps``: steps of the loop between two looks at the queue.
    - ``gamma``, ``window``, ``sink``, ``cache_dtype``: as in ``GenerateOptions``, gamma a number; a request may ask
      for a lower one.
    - ``rest``: batches of a size whose drafts cost more than they bring, by measurement, draft nothing; one more
      program for each number of rows.
    - ``prefix_bytes``: of row states kept with the pages of prompts that were read, so that the next prompt that
      begins alike begins there; 0 keeps none.
    - ``constraints``: requests may be bound to a schema or an expression; two more programs for each number of rows.
    - ``queue``: requests that may wait.
    """

    rows: int = 8
    context: int = 4096
    pages: int | None = None
    page_size: int | None = None
    chunk: int = 256
    prefill_tokens: int = 256
    steps: int = 4
    gamma: int = 3
    window: int = DEFAULT_WINDOW
    sink: int | None = None
    rest: bool = False
    cache_dtype: str | None = None
    prefix_bytes: int = 256 * 2**20
    constraints: bool = False
    queue: int = 1024

    def __post_init__(self) -> None:
        for name in ("rows", "chunk", "prefill_tokens", "steps", "queue"):
            require_integer(name, getattr(self, name), 1, _MOST.get(name))
        require_integer("gamma", self.gamma, 0, MAX_GAMMA)
        require_integer("context", self.context, self.gamma + 3)
        require_integer("prefix_bytes", self.prefix_bytes, 0)
        for name in ("pages", "page_size"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), 1)
        self.generate_options()

    def generate_options(self) -> GenerateOptions:
        """What the drafter is made from. Raises UserError for a window and sink that do not go together."""
        return GenerateOptions(gamma=self.gamma, window=self.window, sink=self.sink, cache_dtype=self.cache_dtype)


def request_options(given: dict[str, Any]) -> GenerateOptions:
    """One request's options, checked. Raises UserError for those that are the engine's, or nobody's."""
    for name in given:
        if name not in REQUEST_FIELDS:
            known = name in {field.name for field in fields(GenerateOptions)}
            what = "is set for the whole engine" if known else "is not known"
            own = ", ".join(sorted(REQUEST_FIELDS))
            raise UserError(f"{name}: {what}; a request may give {own}, gamma, logprobs, constraint")
    return GenerateOptions(**given)
