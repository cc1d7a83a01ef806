"""The log of the device as a sequence of records, and what tests ask of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

from host_cann.dispatch import Dispatcher
from host_cann.errors import HostCannError
from host_cann.records import (
    COLLECTIVES,
    SYNCHRONISED,
    Allocate,
    CaptureBegin,
    CaptureEnd,
    Collective,
    Copy,
    Direction,
    EventRecord,
    EventWait,
    Fill,
    OperatorCall,
    Phase,
    Record,
    Refused,
    Release,
    Replay,
    Synchronise,
)

R = TypeVar("R", bound=Record)


class _Entry(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("stream", ctypes.c_int32),
        ("value", ctypes.c_int64 * 6),
    )


class Recording(Sequence[Record]):
    """Requests in the order in which the device got them; complete when the context ended."""

    def __init__(self) -> None:
        self._records: tuple[Record, ...] = ()

    def fill(self, records: Sequence[Record]) -> None:
        """Set the records, once."""
        self._records = tuple(records)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def of(self, kind: type[R]) -> tuple[R, ...]:
        """Return the records of one kind."""
        return tuple(record for record in self._records if isinstance(record, kind))

    def operators(self, phase: Phase | None = None) -> tuple[str, ...]:
        """Return the names of the operators, in order."""
        return tuple(call.operator for call in self.of(OperatorCall) if phase in (None, call.phase))

    def only(self, operator: str) -> OperatorCall:
        """Return the one call of ``operator``.

        Raises:
            HostCannError: there is none, or there are several.
        """
        found = [call for call in self.of(OperatorCall) if call.operator == operator]
        if len(found) != 1:
            raise HostCannError(f"{len(found)} calls of {operator} in {list(self.operators())}")
        return found[0]

    def expect_operators(self, *names: str) -> None:
        """Check the whole sequence of operators.

        Raises:
            HostCannError: another sequence was recorded.
        """
        if self.operators() != names:
            raise HostCannError(f"the device got {list(self.operators())}, expected {list(names)}")

    def expect_no_host_transfer(self) -> None:
        """Check that nothing crossed between host and device and that the host did not wait.

        Raises:
            HostCannError: with the offending records.
        """
        crossed: list[Record] = [copy for copy in self.of(Copy) if copy.direction != Direction.DEVICE_TO_DEVICE]
        crossed.extend(self.of(Synchronise))
        if crossed:
            raise HostCannError(f"host and device were to be independent, but: {crossed}")

    def expect_ordered(self, first_stream: int, second_stream: int) -> None:
        """Check that work of ``second_stream`` waits for an event that ``first_stream`` recorded.

        Raises:
            HostCannError: no such pair of record and wait.
        """
        recorded: set[int] = set()
        for record in self._records:
            if isinstance(record, EventRecord) and record.stream == first_stream:
                recorded.add(record.event)
            if isinstance(record, EventWait) and record.stream == second_stream and record.event in recorded:
                return
        raise HostCannError(f"stream {second_stream} waits for no event of stream {first_stream}")


class Log:
    """Reads the library's log."""

    def __init__(self, library: ctypes.CDLL, dispatcher: Dispatcher) -> None:
        self._library = library
        self._dispatcher = dispatcher
        library.host_cann_keep_log.argtypes = [ctypes.c_int]
        library.host_cann_log_size.restype = ctypes.c_int64
        library.host_cann_read_log.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]

    def keep(self, *, keep: bool) -> None:
        """Start or stop (and forget) the log."""
        self._dispatcher.keep_calls(keep=keep)
        self._library.host_cann_keep_log(int(keep))

    def position(self) -> int:
        """Return how long the log is."""
        return int(self._library.host_cann_log_size())

    def since(self, start: int) -> list[Record]:
        """Return the records from ``start`` on."""
        count = self.position() - start
        entries = (_Entry * count)()
        self._library.host_cann_read_log(start, count, entries)
        return [self._record(entry) for entry in entries]

    def _record(self, entry: _Entry) -> Record:
        where = (Phase(entry.phase), entry.device, entry.stream)
        a, b, c, d, e, f = entry.value
        match entry.kind:
            case 1:
                call = self._dispatcher.calls[a]
                return OperatorCall(*where, call.operator, call.arguments, call.kernel is not None)
            case 2:
                return Copy(*where, Direction(a), b, c, d, bool(e), None if f < 0 else bool(f))
            case 3:
                return Fill(*where, a, b, c)
            case 4:
                return EventRecord(*where, a)
            case 5:
                return EventWait(*where, a)
            case 6:
                return CaptureBegin(*where, a, b)
            case 7:
                return CaptureEnd(*where, a, b)
            case 8:
                return Replay(*where, a, b)
            case 9:
                return Allocate(*where, a, b)
            case 10:
                return Release(*where, a, b)
            case 11:
                return Collective(*where, COLLECTIVES[a], b, c, d, e, f)
            case 12:
                return Synchronise(*where, SYNCHRONISED[a])
            case 13:
                return Refused(*where, ctypes.string_at(a).decode())
            case _:
                raise HostCannError(f"log entry of unknown kind {entry.kind}")
