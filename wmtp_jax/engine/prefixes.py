"""Beginnings of prompts that were read, page by page: their pages, shared, and what a row holds after each of them."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from wmtp_jax.engine.pages import PagePool

# Names the tokens of the first pages, however many.
Key = bytes


class Found(NamedTuple):
    """A beginning of ``len(pages)`` whole pages. The pages are already shared with whoever asked."""

    pages: list[int]
    kept: Any


@dataclass(frozen=True)
class _Entry:
    pages: list[int]
    kept: Any
    size: int


class Prefixes:
    """At most ``limit`` bytes of row states, the least recently used given up first; their pages count for nothing.

    The pages themselves are the pool's, which asks for them back (``evict``) before anyone has to wait.
    """

    def __init__(self, pool: PagePool, limit: int):
        self._pool = pool
        self._limit = limit
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, keys: Sequence[Key]) -> Found | None:
        """The longest known beginning among those that ``keys`` name, shortest first."""
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                self._pool.share(entry.pages)
                return Found(list(entry.pages), entry.kept)
        return None

    def add(self, key: Key, pages: Sequence[int], keep: Callable[[], Any]) -> None:
        """Keeps a beginning, unless it is known or its state alone exceeds the limit; ``keep`` copies the state."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        if not self._limit:
            return
        kept = keep()
        size = sum(x.nbytes for x in jax.tree.leaves(kept))
        if size > self._limit:
            return
        self._pool.share(pages)
        self._entries[key] = _Entry(list(pages), kept, size)
        self.bytes += size
        while self.bytes > self._limit:
            self.evict()

    def pages_alone(self) -> int:
        """Pages that nobody but these beginnings holds: giving all of them up would free so many."""
        held = Counter(page for entry in self._entries.values() for page in entry.pages)
        return sum(self._pool.references(page) == count for page, count in held.items())

    def evict(self) -> None:
        """Forgets the beginning that was not used for the longest time."""
        _, entry = self._entries.popitem(last=False)
        self._pool.release(entry.pages)
        self.bytes -= entry.size


def page_keys(tokens: Sequence[int], page_size: int) -> list[Key]:
    """A key for each whole page, of all tokens up to its end. One token is left over: something must be read."""
    keys, digest = [], hashlib.sha256()
    array = np.asarray(tokens, np.int32)
    for end in range(page_size, len(array), page_size):
        digest.update(array[end - page_size : end].tobytes())
        keys.append(digest.digest())
    return keys
