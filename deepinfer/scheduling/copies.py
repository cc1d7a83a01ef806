"""The copies that forks are waiting for, and the sources that must not change hands before they are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from deepinfer.cache.blocks import BlockId, BlockPool


class CopyPair(NamedTuple):
    """One block, or one state slot, to be copied for a fork."""

    source: int
    destination: int


class PendingCopies:
    """Copies ordered since the last step with rows.

    Each pending copy owns its source once more, so that the source can be freed by its request but not handed out
    again. A fork of a fork copies from the first source, so no source is ever a destination.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._source_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    @property
    def sources(self) -> list[int]:
        """The source of each pending copy, in the order of their making."""
        return list(self._source_of.values())

    def add(self, source: int, destination: int) -> None:
        """Order a copy of ``source`` to ``destination``."""
        source = self._source_of.get(source, source)
        self._pool.share(BlockId(source))
        self._source_of[destination] = source

    def drop(self, destinations: Iterable[int]) -> None:
        """Forget the copies to ``destinations``, if any were ordered: nobody will read them."""
        for destination in destinations:
            source = self._source_of.pop(destination, None)
            if source is not None:
                self._pool.free(BlockId(source))

    def take(self) -> tuple[CopyPair, ...]:
        """Hand out all pending copies; from now on the sources are held by their requests alone."""
        if not self._source_of:
            return ()
        pairs = tuple(CopyPair(source, destination) for destination, source in self._source_of.items())
        self.drop([pair.destination for pair in pairs])
        return pairs
