"""Engines small enough to drive by the hundred, and requests to drive them with."""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import wmtp_jax as wmtp
from tests.tiny import CONFIGS, tiny_model
from wmtp_jax.decode.sampling import History, batch_sampling, choose, start_history
from wmtp_jax.engine.core import Core
from wmtp_jax.engine.options import EngineOptions
from wmtp_jax.engine.pace import Kind, Pace
from wmtp_jax.generation.rows import Event
from wmtp_jax.model import Model
from wmtp_jax.text.constraints import Constraint, Grammars

CONTEXT = 64
EOS = 3
_choose = jax.jit(choose)


@cache
def small_model(name: str, seed: int = 0) -> Model:
    """A tiny model that ends a text now and then."""
    decoder = tiny_model(name, seed)
    config = replace(decoder.config, eos_ids=(EOS,))
    return Model(decoder=decoder, config=config, tokenizer=lettered(config.vocab_size))


def lettered(vocab_size: int) -> Tokenizer:
    """A token a character: figures, the signs of JSON and some letters; and one that ends a text."""
    characters = list('012<end>3456789{}[]":,abcdefghijklmnopqrstuvwxyz'.replace("<end>", "\0"))[:vocab_size]
    vocabulary = {"<end>" if char == "\0" else char: index for index, char in enumerate(characters)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.add_special_tokens(["<end>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


# Pools of all rows' full contexts, and far smaller ones; pages of one chunk and of several; windows on and off.
ENGINES = {
    "roomy": ("hybrid", dict(rows=3, page_size=8, chunk=8, gamma=3, window=6, sink=2, steps=2)),
    "tight": ("mamba", dict(rows=4, page_size=4, chunk=4, gamma=2, window=5, sink=0, steps=3, pages=18)),
    "long pages": ("attention", dict(rows=2, page_size=16, chunk=4, gamma=4, window=0, steps=1, prefill_tokens=12)),
    "plain": ("recurrent", dict(rows=5, page_size=8, chunk=2, gamma=0, steps=4, pages=9)),
    # Chunks of 64 and, for short prompts, of 32.
    "halved chunks": ("hybrid", dict(rows=2, page_size=64, chunk=64, gamma=2, window=4, sink=1, steps=2)),
    "bound": ("hybrid", dict(rows=3, page_size=4, chunk=4, gamma=3, window=6, sink=2, pages=24, constraints=True)),
    "bound alike": ("mamba", dict(rows=4, page_size=8, chunk=8, gamma=2, window=5, sink=0, constraints=True)),
    "rests": ("hybrid", dict(rows=3, page_size=8, chunk=8, gamma=3, window=6, sink=2, steps=2, rest=True)),
    "no prefixes": ("experts", dict(rows=3, page_size=4, chunk=4, gamma=1, window=1, sink=1, steps=2, prefix_bytes=0)),
}


def make_core(kind: str, **changes: Any) -> Core:
    """An engine without its thread."""
    name, options = ENGINES[kind]
    given = {"context": CONTEXT, "prefill_tokens": 1, **options, **changes}
    core = Core(small_model(name), EngineOptions(**given))
    if core._pace is not None:
        core._pace = Wavering()
    return core


class Wavering(Pace):
    """Rests and drafts by chance, whatever it costs: what the machine is slow at decides no test."""

    def __init__(self):
        super().__init__()
        self._chance = random.Random(0)

    def drafts(self, kind: Kind) -> bool:
        return self._chance.random() < 0.5


CONSTRAINTS = [
    Constraint(regex="[a-e]{2,7}(:[0-9]{2})*"),
    Constraint(regex="(abc|[0-9]+),?"),
    Constraint(json_schema={"type": "array", "items": {"type": "integer"}, "maxItems": 3}),
    Constraint(json_schema={"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}),
]


class Asked(NamedTuple):
    """A request, the turn before which it comes, and the turn before which it is cancelled, if any."""

    prompt: list[int]
    options: dict[str, Any]
    turn: int = 0
    cancelled: int | None = None


@st.composite
def workloads(draw: st.DrawFn, kind: str, most: int = 9) -> list[Asked]:
    """Requests whose prompts often begin alike."""
    name, engine = ENGINES[kind]
    vocab, gamma = CONFIGS[name].vocab_size, engine["gamma"]
    shared = draw(st.lists(st.integers(0, vocab - 1), min_size=40, max_size=40))

    def asked() -> Asked:
        new = draw(st.integers(1, 20))
        most_prompt = CONTEXT - new - gamma - 1
        begin = shared[: draw(st.integers(0, 36))]
        prompt = [*begin, *draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=12))][:most_prompt]
        options: dict[str, Any] = dict(max_new_tokens=new, ignore_eos=draw(st.booleans()))
        if draw(st.booleans()):
            options |= dict(temperature=1.0, seed=draw(st.integers(0, 99)))
        if draw(st.integers(0, 3)) == 0:
            options |= dict(repetition_penalty=1.3, frequency_penalty=0.2)
        if draw(st.integers(0, 3)) == 0:
            options |= dict(gamma=draw(st.integers(0, gamma)))
        if draw(st.integers(0, 3)) == 0:
            options |= dict(logprobs=draw(st.integers(0, 20)))
        if engine.get("constraints") and draw(st.booleans()):
            options |= dict(constraint=draw(st.sampled_from(CONSTRAINTS)), ignore_eos=False)
        cancelled = draw(st.integers(0, 12)) if draw(st.integers(0, 5)) == 0 else None
        return Asked(prompt, options, draw(st.integers(0, 10)), cancelled)

    return [asked() for _ in range(draw(st.integers(1, most)))]


@dataclass
class Heard:
    """What a request's listener was told."""

    events: list[Event] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def __call__(self, event: Event | None, error: Exception | None) -> None:
        if event is not None:
            assert not self.errors, "an event after the end"
            assert not self.finished, "an event after the end"
            self.events.append(event)
        elif error is not None:
            self.errors.append(error)

    @property
    def finished(self) -> str | None:
        return self.events[-1].finished if self.events else None

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]


def drive(core: Core, work: list[Asked], most_turns: int = 5000) -> list[Heard]:
    """Runs a workload to its end."""
    heard, tasks = [Heard() for _ in work], {}
    last = max([asked.turn for asked in work] + [asked.cancelled or 0 for asked in work])
    for turn in range(most_turns):
        for index, asked in enumerate(work):
            if asked.turn == turn:
                tasks[index] = core.make_task(asked.prompt, heard[index], **asked.options)
                core.add(tasks[index])
        for index, asked in enumerate(work):
            if asked.cancelled == turn and index in tasks:
                core.cancel(tasks[index])
        if not core.turn() and turn >= last:
            return heard
    raise AssertionError(f"not at an end after {most_turns} turns: {core.waiting}, {core.running}")


def alone(core: Core, asked: Asked) -> tuple[list[int], str]:
    """What plain decoding of nothing but this request writes, and how it ends."""
    options = {name: value for name, value in asked.options.items() if name not in ("gamma", "logprobs")}
    if "constraint" in options:
        return _alone_and_bound(core.model, asked.prompt, **options)
    # One capacity for all: one program.
    out = wmtp.generate(core.model, asked.prompt, gamma=0, page_size=CONTEXT, chunk=16, **options)
    return out.tokens[0], out.finished[0]


def _alone_and_bound(
    model: Model,
    prompt: list[int],
    constraint: Constraint,
    max_new_tokens: int,
    ignore_eos: bool = False,
    **sampling: Any,
) -> tuple[list[int], str]:
    """By the model's logits of the whole text at every token, without any cache."""
    assert not ignore_eos
    assert model.tokenizer is not None
    matcher = Grammars(model.tokenizer, model.config.vocab_size, model.eos_ids).matcher(constraint)
    (row,) = wmtp.GenerateOptions(**sampling).row_sampling(1)
    history, tokens = start_history([prompt], model.config.vocab_size), []
    while len(tokens) < max_new_tokens:
        length = len(prompt) + len(tokens)
        padded = np.zeros(CONTEXT, np.int32)
        padded[:length] = [*prompt, *tokens]
        logits = np.array(wmtp.logits(model, padded)[:1, length - 1])
        bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")[: logits.shape[1]]
        # By hand: the sampler's own way to read the bits is not what this trusts. No penalty changes what is infinite.
        barred = np.where(bits, logits, -np.inf)
        token = int(_choose(batch_sampling([row]), barred, np.array([length]), history)[0])
        tokens.append(token)
        history = History(history.in_prompt, history.emitted.at[0, token].add(1))
        if token == EOS:
            return tokens, "stop"
        matcher.advance([token])
    return tokens, "length"


def assert_nothing_is_held(core: Core) -> None:
    """An idle engine holds no slot, and no page but those of known prefixes."""
    assert not core.running
    assert not core.waiting
    assert len(core._free_slots) == core.options.rows
    assert core.pool.free + core.prefixes.pages_alone() == core.pool.pages
    while len(core.prefixes):
        core.prefixes.evict()
    assert core.prefixes.bytes == 0
    assert core.pool.free == core.pool.pages
