"""Who is in a group of ranks, and who is missing: a store that rank 0 holds at the group's address.

For drivers, whatever carries their exchanges. Ranks that join say so in the store. A rank whose exchange fails says
that too, and looks who else did: who says nothing is missing. A last part of the deadline is kept for this roll call.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from deepinfer.accelerator.collectives import LostRanksError, RankPlace
from deepinfer.errors import OpRefusedError

_LONGEST_S: Final = 0.5
_SHARE_OF_DEADLINE: Final = 0.25
_POLL_S: Final = 0.01
_SHORTEST: Final = datetime.timedelta(milliseconds=1)
_GIVEN_UP: Final = "given up"


class RollCall:
    """One rank's view of the store.

    Attributes:
        name: of the group, for messages.
    """

    def __init__(self, place: RankPlace, name: str) -> None:
        """Open the store, or find it; raises within the deadline if rank 0 does not hold one."""
        self.name = name
        self._place = place
        self._others = tuple(rank for rank in range(place.world_size) if rank != place.rank)
        self._duration_s = min(_LONGEST_S, _SHARE_OF_DEADLINE * place.deadline_s)
        self._joining_until = self.deadline()
        self._store = self._open(self._joining_until)

    def deadline(self) -> float:
        """Return the time until which something that begins now may take, a roll call left aside."""
        return time.monotonic() + self._place.deadline_s - self._duration_s

    def keys(self, prefix: str) -> Store:
        """Return the part of the store for keys of another use."""
        return PrefixStore(prefix, self._store)

    def join(self) -> float:
        """Say that this rank is here and wait until all have said so; return the time that is left to connect.

        Raises:
            LostRanksError: with the ranks that did not.
        """
        until = self._joining_until
        keys = {rank: f"joined/{rank}" for rank in range(self._place.world_size)}
        silent = self._others
        why = f"joining, within {self._place.deadline_s:g} s"
        try:
            self._store.set(keys[self._place.rank], "here")
            while silent and time.monotonic() < until:
                silent = self._poll({rank: keys[rank] for rank in silent})
                if silent and self._store.check([_GIVEN_UP]):
                    why = f"another rank gave up: {self._store.get(_GIVEN_UP).decode()}"
                    break
        except RuntimeError:
            silent = _silent_without_store(silent)
        if silent:
            self.report(why, _GIVEN_UP)
            # Rank 0 keeps the store open until those who are here have learnt who is not.
            self._hear({rank: f"failed/{rank}" for rank in self._others if rank not in silent})
            raise LostRanksError(self.name, silent, why)
        return until

    def report(self, why: str, *more_keys: str) -> None:
        """Tell the others that this rank's part in the group has failed."""
        try:
            for key in (*more_keys, f"failed/{self._place.rank}"):
                self._store.set(key, why)
        except RuntimeError:
            return  # The store is gone with rank 0: whoever asks it learns that as well.

    def failure(self, what: str, cause: RuntimeError | str) -> LostRanksError:
        """Return the error of a failed exchange: missing is who does not report a failure of its own in time."""
        self.report(f"{what}: {cause}")
        keys = {rank: f"failed/{rank}" for rank in self._others}
        silent = self._hear(keys)
        others = "" if silent else f"; the others say: {self._reports(keys.values())}"
        return LostRanksError(self.name, silent, f"rank {self._place.rank} in {what}: {cause}{others}")

    def _open(self, until: float) -> Store:
        place = self._place
        is_holder = place.rank == 0
        if not is_holder:
            self._await_listener(until)
        try:
            return TCPStore(
                place.host, place.port, place.world_size, is_holder, time_left(until), wait_for_workers=False
            )
        except RuntimeError as error:
            if is_holder:
                raise OpRefusedError(
                    f"{self.name}: rank 0 cannot listen there: {error}. Give an address of its machine with a free "
                    f"port, the same to every rank."
                ) from error
            raise LostRanksError(self.name, (0,), f"rank 0's store does not answer: {error}") from error

    def _await_listener(self, until: float) -> None:
        """Wait until somebody listens: the store's own attempts outlast their deadline and fill the log."""
        place = self._place
        while True:
            try:
                socket.create_connection((place.host, place.port), timeout=time_left(until).total_seconds()).close()
            except OSError as error:
                if time.monotonic() >= until:
                    why = f"nobody listened within {place.deadline_s:g} s ({error})"
                    raise LostRanksError(self.name, (0,), why) from error
                time.sleep(_POLL_S)
            else:
                return

    def _reports(self, keys: Iterable[str]) -> str:
        try:
            return "; ".join(self._store.get(key).decode() for key in keys)
        except RuntimeError as error:
            return f"nothing more, the store is gone ({error})"

    def _hear(self, keys: Mapping[int, str]) -> tuple[int, ...]:
        """Wait for the keys of ranks as long as a roll call lasts; return the ranks whose keys did not come."""
        until = time.monotonic() + self._duration_s
        silent = tuple(keys)
        try:
            while silent and time.monotonic() < until:
                silent = self._poll({rank: keys[rank] for rank in silent})
        except RuntimeError:
            return _silent_without_store(silent)
        return silent

    def _poll(self, keys: Mapping[int, str]) -> tuple[int, ...]:
        """Return the ranks whose keys are not there; wait a moment if there are any.

        The store's own ``wait`` is not used: each of its time-outs writes two lines to the log of the process.
        """
        silent = tuple(rank for rank, key in keys.items() if not self._store.check([key]))
        if silent:
            time.sleep(_POLL_S)
        return silent


def time_left(until: float) -> datetime.timedelta:
    """Return the time that is left; never nothing, which Gloo would take for no limit."""
    return max(_SHORTEST, datetime.timedelta(seconds=until - time.monotonic()))


def _silent_without_store(silent: tuple[int, ...]) -> tuple[int, ...]:
    """Return who is missing when the store has gone: rank 0 with it, unless it was heard and gave up earlier."""
    return (0,) if 0 in silent else silent
