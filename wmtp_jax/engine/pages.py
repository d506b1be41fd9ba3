"""Which pages of the target's pool are free, and how many hold each of the others. No arrays: only numbers."""

from collections.abc import Iterable


class PagePool:
    """Pages 0 .. ``pages`` - 1. A page is free when nobody holds it; those who share one each hold it once."""

    def __init__(self, pages: int):
        self.pages = pages
        # The last given back is taken first: it may still be in the processor's cache.
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """How many hold this page."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """So many free pages, each now held once; None, and nothing taken, where there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for pages that are held already."""
        for page in pages:
            assert self._holders[page], f"page {page} is free: it cannot be shared"
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One holder less."""
        for page in pages:
            assert self._holders[page], f"page {page} is given back once too often"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
