"""Text that must fit a JSON schema or a regular expression: which tokens may come next, after any run of drafts.

The grammars are those of llguidance, which walks the vocabulary's bytes.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt32
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from wmtp_jax.errors import UserError

# Any amount of white space is JSON, and a weak model writes nothing else for ever.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
# What one text's grammar may cost those beside it: the library's own limits are about 16 ms a mask and 500 MB.
_LIMITS = LLParserLimits(step_lexer_fuel=70_000, step_max_items=25_000, max_lexer_states=30_000)
_KEPT_GRAMMARS = 16
# llguidance goes eight KB deeper into the stack for each schema inside another, and a short text can chain thousands of
# them by references: a schema of so many bytes cannot get to the end of so large a stack. (Unused, it is no memory.)
_SCHEMA_BYTES = 2**18
_STACK_BYTES = 2**28
_stack_size_is_set = threading.Lock()
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a text must be: JSON that fits ``json_schema``, or all of it a match of ``regex``. Exactly one is given.

    A schema is an object as parsed from JSON; what llguidance leaves unimplemented is refused, not ignored.
    """

    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if (self.json_schema is None) == (self.regex is None):
            raise UserError("a constraint is either a json_schema or a regex", field="constraint")
        if self.json_schema is not None and not isinstance(self.json_schema, Mapping):
            raise _error("json_schema", f"must be an object, not {type(self.json_schema).__name__}")
        if self.json_schema is not None and "x-guidance" in self.json_schema:
            raise _error("json_schema", "x-guidance: a schema cannot set how strictly it is followed")
        if self.regex is not None and not isinstance(self.regex, str):
            raise _error("regex", f"must be text, not {type(self.regex).__name__}")

    def grammar(self) -> str:
        """As llguidance takes it. Raises UserError for a schema that is no JSON."""
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        try:
            schema = json.dumps(self.json_schema)
            if len(schema) > _SCHEMA_BYTES:
                raise _error("json_schema", f"is larger than {_SCHEMA_BYTES} bytes")
            return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
        except (TypeError, ValueError, RecursionError) as error:
            raise _error("json_schema", _one_line(error)) from None


class Grammars:
    """Makes matchers for one vocabulary of ``vocab_size`` logits, some of which may be no token's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        if not eos_ids:
            raise UserError("a constraint needs a model with an end token, and this one has none")
        self._vocabulary = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(eos_ids))
        # Several texts often have one schema, which can take long to read.
        self._compiled = lru_cache(_KEPT_GRAMMARS)(self._compile)

    def matcher(self, constraint: Constraint) -> "Matcher":
        """A matcher before the first token. Raises UserError for what llguidance cannot make a grammar of."""
        inner = self._compiled(constraint.grammar())
        if inner.is_error():
            name = "regex" if constraint.regex is not None else "json_schema"
            raise _error(name, _one_line(inner.get_error()))
        return Matcher(inner.deep_copy(), -(-self._vocabulary.vocab_size // 32))

    def _compile(self, grammar: str) -> LLMatcher:
        return _on_a_deep_stack(lambda: LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS))


def _on_a_deep_stack(call: Callable[[], T]) -> T:
    """What the call returns, or raises, on a thread of its own."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    with _stack_size_is_set:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="wmtp-grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    return made.result()


class GrammarFailed(RuntimeError):
    """A grammar became too large to follow in the middle of a text."""


class Matcher:
    """How far a text has come in its grammar. ``words`` 32-bit words hold a bit for each token."""

    def __init__(self, inner: LLMatcher, words: int):
        self._inner = inner
        self.words = words

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes in what was emitted. Raises GrammarFailed where that is not possible."""
        if not self._inner.consume_tokens(list(tokens)):
            raise GrammarFailed(f"the constraint cannot be followed: {_one_line(self._inner.get_error())}")

    def allowed(self, drafts: Sequence[int] = ()) -> UInt32[np.ndarray, "N W"]:
        """The tokens that may follow what was emitted and each of ``drafts``, a bit each, the lowest first.

        After a draft that may not be, every bit is set: nothing behind it is emitted.
        """
        rows, taken = [self._bits()], 0
        for draft in drafts:
            if draft < 0 or self._inner.is_stopped() or not self._inner.try_consume_tokens([draft]):
                break
            taken += 1
            rows.append(self._bits())
        if taken and not self._inner.rollback(taken):
            raise GrammarFailed(f"the constraint cannot be followed: {_one_line(self._inner.get_error())}")
        found = np.full((len(drafts) + 1, self.words), 2**32 - 1, np.uint32)
        found[: len(rows)] = rows
        return found

    def _bits(self) -> UInt32[np.ndarray, " W"]:
        # There can be a word more than the vocabulary has.
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint32)[: self.words]
        if self._inner.is_error():
            raise GrammarFailed(f"the constraint cannot be followed: {_one_line(self._inner.get_error())}")
        return bits


def _error(name: str, message: str) -> UserError:
    return UserError(f"{name}: {message}", field="constraint")


def _one_line(error: Any) -> str:
    """The first line that says something, of a message that goes on to draw the place."""
    if "NoExtensionBias" in str(error):
        return "no text fits it"
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next((line for line in [*told, *lines] if line), "it is not valid")
