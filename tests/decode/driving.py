"""How the tests drive the loop: one table of static shapes, so that hundreds of examples share a few programs."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jaxtyping import Array, Int

from tests.decode.drafters import SteeredDrafter
from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.decode.drafter import Drafter, MTPDrafter
from wmtp_jax.decode.loop import decode
from wmtp_jax.decode.prefill import prefill, round_capacity, start_state
from wmtp_jax.decode.sampling import Sampling, batch_sampling
from wmtp_jax.decode.sampling_params import SamplingParams
from wmtp_jax.decode.state import DecodeState
from wmtp_jax.models.decoder import Decoder
from wmtp_jax.models.parameters import pack


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Everything that is compiled in. ``capacity`` bounds prompt and text of a row; later rows get fewer pages."""

    model: str
    gamma: int
    window: int
    sink: int
    page: int
    chunk: int
    rows: int
    stochastic: bool = False
    filtered: bool = False
    penalized: bool = False
    unrolled: bool = False
    capacity: int = 80

    @property
    def vocab(self) -> int:
        return CONFIGS[self.model].vocab_size

    def make(self, seed: int) -> Decoder:
        """A model of this shape with weights drawn from ``seed``."""
        return tiny_model(self.model, seed, unrolled=self.unrolled)

    @property
    def capacities(self) -> list[int]:
        """Positions of each row, drafts past the end included."""
        return [round_capacity(self.capacity - 17 * row, self.page) for row in range(self.rows)]

    @property
    def windowed(self) -> MTPDrafter:
        return MTPDrafter(gamma=self.gamma, window=self.window, sink=self.sink)

    @property
    def native(self) -> MTPDrafter:
        return MTPDrafter(gamma=self.gamma)

    @property
    def steered(self) -> SteeredDrafter:
        return SteeredDrafter(gamma=self.gamma, window=self.window, sink=self.sink)

    def __str__(self) -> str:
        flags = "".join(name[0] for name in ("stochastic", "filtered", "penalized") if getattr(self, name))
        return f"{self.model}-g{self.gamma}-w{self.window}-s{self.sink}-p{self.page}-c{self.chunk}-b{self.rows}-{flags}"


# Windows of 1 to 40, sinks of 0 to 9, runs of 2 to 9, pages of 1 to 32, chunks of 3 to 64, 1 to 4 query heads a key
# head, one and two periods, every sampling flag on and off.
SHAPES = [
    Shape(model="hybrid", gamma=3, window=6, sink=2, page=8, chunk=16, rows=3),
    Shape(model="experts", gamma=2, window=1, sink=0, page=16, chunk=5, rows=2, stochastic=True),
    Shape(model="attention", gamma=8, window=13, sink=9, page=1, chunk=64, rows=1, stochastic=True, filtered=True),
    Shape(model="mamba", gamma=4, window=5, sink=2, page=8, chunk=9, rows=3, stochastic=True),
    Shape(model="recurrent", gamma=1, window=40, sink=1, page=32, chunk=3, rows=4, penalized=True),
    Shape(
        model="hybrid", gamma=5, window=2, sink=5, page=5, chunk=33, rows=2,
        stochastic=True, filtered=True, penalized=True, unrolled=True,
    ),
]  # fmt: skip


class Request(NamedTuple):
    """One row's share of an example."""

    prompt: list[int]
    limit: int
    stop: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Batch:
    """A batch of requests of one shape."""

    shape: Shape
    requests: list[Request]

    @property
    def prompts(self) -> list[list[int]]:
        return [request.prompt for request in self.requests]

    @cached_property
    def sampling(self) -> Sampling:
        """With the shape's flags, so that no example compiles a program of its own."""
        flags = {name: getattr(self.shape, name) for name in ("stochastic", "filtered", "penalized")}
        return replace(batch_sampling([request.sampling for request in self.requests]), **flags)

    @cached_property
    def stops(self) -> Int[Array, "B 1"]:
        return jnp.asarray([[request.stop] for request in self.requests])


class Outcome(NamedTuple):
    """What a batch came to: each row's text, the acceptance histogram, and the last state."""

    texts: list[list[int]]
    accepted: np.ndarray
    state: DecodeState


def prefilled(model: Decoder, drafter: Drafter, batch: Batch, table: np.ndarray | None = None) -> DecodeState:
    """The state after the prompts. ``table`` holds what a steered drafter drafts."""
    shape, run = batch.shape, drafter.gamma + 1
    room = [capacity - run - len(prompt) for capacity, prompt in zip(shape.capacities, batch.prompts, strict=True)]
    state = start_state(
        model, drafter, batch.prompts, room, page_size=shape.page, dtype=jnp.float32, penalized=shape.penalized
    )
    limits = jnp.asarray([request.limit for request in batch.requests], jnp.int32)
    state = replace(state, remaining=limits)
    if table is not None:
        state = replace(state, draft=state.draft._replace(table=jnp.asarray(table)))
    return prefill(model, drafter, state, batch.prompts, batch.sampling, batch.stops, chunk=shape.chunk)


def run(model: Decoder, drafter: Drafter, batch: Batch, table: np.ndarray | None = None) -> Outcome:
    """Prefills and decodes until every row is done."""
    state = prefilled(model, drafter, batch, table)
    packed, texts = pack(model), [[int(token)] for token in state.pending]
    accepted = np.zeros(drafter.gamma + 1, int)
    while not bool(jnp.all(state.done)):
        state, emitted = decode(packed, drafter, state, batch.sampling, batch.stops, 1)
        append(texts, emitted)
        accepted += np.asarray(emitted.accepted)
    return Outcome(texts, accepted, state)


def append(texts: list[list[int]], emitted: Any) -> None:
    """Adds what a call of ``decode`` emitted to each row's text."""
    tokens, counts = np.asarray(emitted.tokens), np.asarray(emitted.count)
    for text, row, count in zip(texts, tokens, counts, strict=True):
        text += row[:count].tolist()


def samplings(shape: Shape) -> st.SearchStrategy[SamplingParams]:
    """Sampling parameters that the shape's flags allow, neutral ones among them."""
    fields: dict[str, Any] = dict(seed=st.integers(0, 2**32 - 1))
    if shape.stochastic:
        fields |= dict(temperature=st.sampled_from([0.0, 0.4, 1.0, 1.7]))
    if shape.filtered:
        fields |= dict(
            top_k=st.sampled_from([0, 1, 3, 12, 1000]),
            top_p=st.sampled_from([1.0, 0.9, 0.4]),
            min_p=st.sampled_from([0.0, 0.02, 0.3]),
        )
    if shape.penalized:
        fields |= dict(
            repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
            presence_penalty=st.sampled_from([0.0, 0.7]),
            frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
        )
    return st.builds(SamplingParams, **fields)


@st.composite
def batches(draw: st.DrawFn, shape: Shape, *, stops: bool = False) -> Batch:
    """Requests that fit the shape: prompts of any length, often about a multiple of the chunk, and texts of any."""
    requests = []
    for capacity in shape.capacities:
        room = capacity - shape.gamma - 1
        longest = min(room - 1, 50)
        near = [n + d for n in (shape.chunk, 2 * shape.chunk, shape.gamma + 1) for d in (-1, 0, 1)]
        size = draw(st.sampled_from([n for n in near if 1 <= n <= longest]) | st.integers(1, longest))
        prompt = draw(st.lists(st.integers(0, shape.vocab - 1), min_size=size, max_size=size))
        limit = draw(st.integers(1, min(30, room - size)))
        stop = draw(st.integers(0, shape.vocab - 1)) if stops else -1
        requests.append(Request(prompt, limit, stop, draw(samplings(shape))))
    return Batch(shape, requests)
