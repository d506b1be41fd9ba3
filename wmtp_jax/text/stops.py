"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the first stop string, and holds back an end that could be the beginning of one.

    The first is the one that is complete first when the text is read character by character, and the longest of those
    that are complete at the same character: the cut does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that can be shown now. After a stop string is ``found`` there is no more."""
        if self.found:
            return ""
        text = self._held + piece
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits)[1]]
        shown = len(text) - self._possible_start(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """How long an end of the text is the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
