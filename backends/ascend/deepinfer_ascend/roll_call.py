"""Who of a group is there: a store at the group's address, which rank 0 holds.

A rank that joins says so in the store. A rank whose exchange fails says that too and listens for a moment: who says
nothing is missing. HCCL itself never tells which rank it waits for.
"""

from __future__ import annotations

import datetime
import socket
import time
from typing import Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from deepinfer.accelerator.collectives import LostRanksError, RankPlace
from deepinfer.errors import OpRefusedError

POLL_S: Final = 0.01
_MOST_LISTENING_S: Final = 0.5
_LISTENING_SHARE: Final = 0.25
_LEAST: Final = datetime.timedelta(milliseconds=1)


class RollCall:
    """One rank's part of the store."""

    def __init__(self, place: RankPlace, group: str) -> None:
        """Hold the store (rank 0) or find it; LostRanksError when rank 0 does not answer within the deadline."""
        self._place = place
        self._group = group
        self._others = tuple(rank for rank in range(place.world_size) if rank != place.rank)
        self._listening_s = min(_MOST_LISTENING_S, _LISTENING_SHARE * place.deadline_s)
        self._until = self.deadline()
        self._store = self._opened()

    def deadline(self) -> float:
        """Return until when something that begins now may take: the deadline without the time to listen."""
        return time.monotonic() + self._place.deadline_s - self._listening_s

    def keys(self, prefix: str) -> Store:
        """Return a part of the store for the transport's own keys."""
        return PrefixStore(prefix, self._store)

    def join(self) -> None:
        """Return once every rank has joined; LostRanksError with those that did not."""
        silent = self._others
        try:
            self._store.set(f"joined/{self._place.rank}", "here")
            while silent and time.monotonic() < self._until and not self._store.check(["given up"]):
                silent = self._silent("joined", silent)
        except RuntimeError:
            silent = (0,)
        if not silent:
            return
        self._say("given up")
        self._say(f"failed/{self._place.rank}")
        if self._place.rank == 0:
            # The store must live until those who are here have read who is not.
            self._listen(tuple(rank for rank in self._others if rank not in silent))
        raise LostRanksError(self._group, silent, f"joining within {self._place.deadline_s:g} s")

    def failure(self, what: str, cause: str) -> LostRanksError:
        """Return the error of an exchange that failed: missing is who reports no failure of its own in time."""
        self._say(f"failed/{self._place.rank}")
        return LostRanksError(self._group, self._listen(self._others), f"rank {self._place.rank} in {what}: {cause}")

    def _opened(self) -> Store:
        place, holds = self._place, self._place.rank == 0
        while not holds:
            # The store's own attempts outlast their time limit; a bare connection does not.
            try:
                socket.create_connection((place.host, place.port), timeout=self._left_s()).close()
            except OSError as error:
                if time.monotonic() >= self._until:
                    raise LostRanksError(self._group, (0,), f"nobody listens there ({error})") from error
                time.sleep(POLL_S)
            else:
                break
        limit = max(_LEAST, datetime.timedelta(seconds=self._left_s()))
        try:
            return TCPStore(place.host, place.port, place.world_size, holds, limit, wait_for_workers=False)
        except RuntimeError as error:
            if holds:
                raise OpRefusedError(
                    f"{self._group}: rank 0 cannot listen there: {error}. Give an address of its machine with a free "
                    f"port, the same to every rank."
                ) from error
            raise LostRanksError(self._group, (0,), f"rank 0's store does not answer: {error}") from error

    def _left_s(self) -> float:
        return max(POLL_S, self._until - time.monotonic())

    def _say(self, key: str) -> None:
        try:
            self._store.set(key, "yes")
        except RuntimeError:
            return  # The store went with rank 0, and whoever asks it learns that.

    def _listen(self, silent: tuple[int, ...]) -> tuple[int, ...]:
        until = time.monotonic() + self._listening_s
        try:
            while silent and time.monotonic() < until:
                silent = self._silent("failed", silent)
        except RuntimeError:
            return (0,)
        return silent

    def _silent(self, word: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        silent = tuple(rank for rank in ranks if not self._store.check([f"{word}/{rank}"]))
        if silent:
            time.sleep(POLL_S)
        return silent
