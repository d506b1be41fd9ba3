"""Text from tokens that arrive one by one, never half a character."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A UTF-8 character is up to four bytes long, so at most three bytes at the end can still become one.
_OPEN_BYTES = 3
# What a decoder may look back at (a space that it strips from the first word, a character in several tokens).
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Decodes the last few tokens only, whatever the length of the text.

    ``prompt`` is what the text continues: its last tokens decide how the first new ones read.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._finished_tokens = len(self._tokens)
        self._shown = _settled(decode(self._tokens)) if self._tokens else 0

    def push(self, token: int) -> str:
        """The text that is certain now and was not before; empty within a character."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        settled = _settled(text)
        new = text[self._shown : settled]
        self._shown = max(self._shown, settled)
        if new and settled == len(text):
            self._forget()
        return new

    def finish(self) -> str:
        """What was held back: an incomplete character, as U+FFFD."""
        text = self._decode(self._tokens)
        new = text[self._shown :]
        self._shown = len(text)
        return new

    def _forget(self) -> None:
        """At a character's end the tokens of the text before the newest piece are needed no more."""
        self._tokens = self._tokens[self._finished_tokens :]
        self._finished_tokens = len(self._tokens)
        self._shown = len(self._decode(self._tokens))


def _settled(text: str) -> int:
    """How many characters no later token can change."""
    open_bytes = len(text) - len(text.rstrip(REPLACEMENT))
    return len(text) - min(open_bytes, _OPEN_BYTES)
