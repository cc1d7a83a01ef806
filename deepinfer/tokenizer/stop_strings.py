"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What one more piece of text came to.

    Attributes:
        text: text that may be handed out now.
        stop: the stop string that ended the text, or None.
    """

    text: str
    stop: str | None


class StopStringMatcher:
    """Finds the stop string that is completed first, wherever the pieces are cut.

    Among stop strings completed by the same character the longest counts. Both rules look at characters only, so the
    result never depends on how the text was cut into tokens, and the text ends as early as any stop string allows.

    Only text that could be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Start with no text.

        Args:
            stops: the stop strings, none of them empty; there may be none at all.
            include_stop: hand the stop string out as the end of the text.

        Raises:
            ArgumentError: if a stop string is empty.
        """
        if "" in stops:
            raise ArgumentError("stop strings", ["one of them is empty, which would end every text at once"])
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._ended = False

    def add(self, piece: str, *, may_stop: bool = True) -> StopMatch:
        """Take one more piece of text.

        Args:
            piece: the text.
            may_stop: whether a stop string completed by this piece counts (not before ``min_tokens``).

        Returns:
            What can be handed out; after a match, always nothing.
        """
        if self._ended:
            return StopMatch("", None)
        text = self._held + piece
        if may_stop:
            stop, end = self._first_completed(text)
            if stop is not None:
                self._ended = True
                self._held = ""
                return StopMatch(text[: end if self._include_stop else end - len(stop)], stop)
        held = self._possible_beginning(text)
        self._held = text[len(text) - held :]
        return StopMatch(text[: len(text) - held], None)

    def finish(self) -> str:
        """Return what was held back, when no more text comes; a second call returns nothing."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str) -> tuple[str | None, int]:
        best: str | None = None
        best_end = 0
        for stop in self._stops:
            # What ended within the held text was passed over when it came.
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            end = start + len(stop)
            if start >= 0 and (best is None or (end, -len(stop)) < (best_end, -len(best))):
                best, best_end = stop, end
        return best, best_end

    def _possible_beginning(self, text: str) -> int:
        """Return the length of the longest end of the text that is a proper beginning of some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if stop[length - 1] == text[-1] and text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
