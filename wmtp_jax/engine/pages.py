"""Which pages of the target's pool are free, and how many hold each of the others. No arrays: only numbers."""

from collections.abc import Iterable


class PagePool:
    """Pages 0 .. ``pages`` - 1. A page is free when nobody holds it; those who share one each hold it once."""

    def __init__(self, pages: int):
        self.pages = pages
        # The last given back is taken first: it may still be in the processor's cache.
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many hold this page."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """So many free pages, each now held once; the caller has seen that there are as many."""
        assert count <= len(self._free), f"{count} pages are taken where {len(self._free)} are free"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for pages that are held already."""
        for page in pages:
            assert self._references[page], f"page {page} is free: it cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less."""
        for page in pages:
            assert self._references[page], f"page {page} is given back once too often"
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)
