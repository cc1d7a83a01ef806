"""Every live request and the queue it is in; the only code that changes a request's state."""

from __future__ import annotations

from collections import OrderedDict, abc
from collections.abc import Iterator
from typing import NamedTuple

from deepinfer.errors import ArgumentError, DuplicateRequestError
from deepinfer.scheduling.memory import Memory
from deepinfer.scheduling.running import RunningBatch
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import Place, Status, move
from deepinfer.scheduling.step import TerminalRecord


class Ending(NamedTuple):
    """A request that ends by itself, and how."""

    sequence: Sequence
    status: Status
    stop_reason: int | None


class Roster:
    """The live requests by id, the queues ``waiting`` and ``prompted``, the running rows, and how requests ended.

    Attributes:
        running: the running requests, as the columns that a decode step reads.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._live: dict[str, Sequence] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._prompted: OrderedDict[str, Sequence] = OrderedDict()
        self.running = RunningBatch(memory.table)
        self._num_arrived = 0
        # Forks that got state while others waited, since one of those that wait without memory last got some.
        self.forks_ahead = 0
        self._ended: list[tuple[Sequence, TerminalRecord]] = []

    # --- who is where -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live.values())

    def find(self, request_id: str) -> Sequence | None:
        """Return the live request of that id."""
        return self._live.get(request_id)

    @property
    def num_waiting(self) -> int:
        """Requests in the waiting queue."""
        return len(self._waiting)

    @property
    def num_prompted(self) -> int:
        """Requests whose state is computed and that wait for a place among the running ones."""
        return len(self._prompted)

    @property
    def num_running(self) -> int:
        """Requests that the next decode step may serve."""
        return len(self.running)

    @property
    def head(self) -> Sequence | None:
        """The first request of the waiting queue."""
        return next(iter(self._waiting.values()), None)

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting queue, head first."""
        return list(self._waiting.values())

    @property
    def prompted(self) -> list[Sequence]:
        """The prompted queue, head first."""
        return list(self._prompted.values())

    # --- what changes -------------------------------------------------------------------------------------------

    def register(self, sequence: Sequence) -> None:
        """Make a request live, in no queue yet; its id must not be alive."""
        if sequence.request_id in self._live:
            raise DuplicateRequestError(
                f"request id {sequence.request_id!r} is alive; abort it, or choose another id for the new request"
            )
        if sequence.place is not Place.NOWHERE or sequence.status.is_finished:
            raise ArgumentError(
                f"request {sequence.request_id!r}",
                [f"this object is {sequence.status.name} already; make a new Sequence for each request"],
            )
        self._num_arrived += 1
        sequence.arrival = sequence.root_arrival = self._num_arrived
        self._live[sequence.request_id] = sequence

    def enqueue(self, sequence: Sequence, *, front: bool) -> None:
        """Put a request into the waiting queue."""
        self._relocate(sequence, Status.WAITING, Place.WAITING)
        self._waiting[sequence.request_id] = sequence
        if front:
            self._waiting.move_to_end(sequence.request_id, last=False)

    def await_decode(self, sequence: Sequence) -> None:
        """Put a request whose state is computed into the prompted queue."""
        self._relocate(sequence, Status.WAITING, Place.PROMPTED)
        self._prompted[sequence.request_id] = sequence

    def take_flight(self, sequence: Sequence, *, is_partial: bool) -> None:
        """Hand a prompt chunk to a step; the last chunk of a prompt makes its request RUNNING."""
        self._relocate(sequence, Status.WAITING if is_partial else Status.RUNNING, Place.IN_FLIGHT)

    def join_running(self, sequence: Sequence) -> None:
        """Let the next decode step serve a request."""
        self._relocate(sequence, Status.RUNNING, Place.RUNNING)
        self.running.join(sequence)

    def depart(self, sequence: Sequence) -> None:
        """Let a running request go to another engine, with everything that it owns here given back."""
        self._relocate(sequence, Status.RUNNING, Place.NOWHERE)
        self._memory.release(sequence)
        del self._live[sequence.request_id]

    def end(
        self, sequence: Sequence, status: Status, *, stop_reason: int | str | None = None, text: str = ""
    ) -> TerminalRecord:
        """End a request: everything it owns goes back and its one terminal record is written."""
        self._relocate(sequence, status, Place.NOWHERE)
        self._memory.release(sequence)
        return self._write_record(sequence, stop_reason, text)

    def end_many(self, endings: abc.Sequence[Ending]) -> list[TerminalRecord]:
        """End requests, in order, as ``end`` does; for less, because what they own goes back together."""
        for sequence, status, _ in endings:
            self._relocate(sequence, status, Place.NOWHERE)
        self._memory.release_many([ending.sequence for ending in endings])
        return [self._write_record(sequence, stop_reason, "") for sequence, _, stop_reason in endings]

    def _write_record(self, sequence: Sequence, stop_reason: int | str | None, text: str) -> TerminalRecord:
        del self._live[sequence.request_id]
        record = TerminalRecord(
            request_id=sequence.request_id,
            status=sequence.status,
            stop_reason=stop_reason,
            text=text,
            num_prompt_tokens=sequence.num_prompt_tokens,
            output_token_ids=tuple(sequence.output_token_ids),
            preemptions=sequence.preemptions,
        )
        self._ended.append((sequence, record))
        return record

    def overrule_length_cap(self, request_id: str, stop_reason: int | str | None) -> bool:
        """Let a stop found at the very token of the length cap win, as long as the record was not handed out."""
        for index in range(len(self._ended) - 1, -1, -1):
            sequence, record = self._ended[index]
            if record.request_id == request_id:
                if record.status is not Status.FINISHED_LENGTH_CAPPED:
                    return False
                move(sequence, Status.FINISHED_STOPPED, Place.NOWHERE)
                self._ended[index] = (sequence, record._replace(status=sequence.status, stop_reason=stop_reason))
                return True
        return False

    def take_terminals(self) -> list[TerminalRecord]:
        """Hand out the records of all requests that ended since the last call, in the order in which they ended."""
        ended, self._ended = self._ended, []
        return [record for _, record in ended]

    def _relocate(self, sequence: Sequence, status: Status, place: Place) -> None:
        left = sequence.place
        move(sequence, status, place)
        if left is Place.WAITING:
            del self._waiting[sequence.request_id]
        elif left is Place.PROMPTED:
            del self._prompted[sequence.request_id]
        elif left is Place.RUNNING:
            self.running.leave(sequence)
