"""The language of faults: which op, at which calls, what goes wrong, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from deepinfer.accelerator.ops import all_op_names
from deepinfer.errors import ArgumentError, DeepInferError

RESULT = "result"
DEVICE_CALLS = ("device.allocate", "device.synchronize")
"""Calls of the driver itself that can be struck like ops."""


class FaultKind(StrEnum):
    """What goes wrong."""

    VALUE = "value"
    """One element is off by ``amount`` (a boolean is inverted)."""
    NAN = "nan"
    """One element is NaN."""
    BIT = "bit"
    """One bit of one element is flipped."""
    DELAY = "delay"
    """The call takes ``delay_s`` longer."""
    RAISE = "raise"
    """The call raises InjectedFaultError and does nothing."""
    OUT_OF_MEMORY = "out_of_memory"
    """The call raises torch.OutOfMemoryError and does nothing."""
    STALE = "stale"
    """The call returns what the op returned ``calls_ago`` calls earlier; an op that returns nothing does nothing."""


class InjectedFaultError(DeepInferError):
    """A fault that was asked for; never a fault of the engine or of a driver."""


_IN_TENSORS = frozenset({FaultKind.VALUE, FaultKind.NAN, FaultKind.BIT})


@dataclass(frozen=True, slots=True)
class Calls:
    """Numbers of the calls that are struck, counted per op from 1 over the life of the driver; by default all.

    Attributes:
        first: the first call that is struck.
        last: the last one; None for no end.
        every: only every so many calls from the first.
    """

    first: int = 1
    last: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.first < 1 or self.every < 1 or (self.last is not None and self.last < self.first):
            raise ArgumentError("Calls", [f"{self} names no call; calls are counted from 1, and every is at least 1"])

    @classmethod
    def at(cls, number: int) -> Calls:
        """Return one call."""
        return cls(number, number)

    def include(self, number: int) -> bool:
        """Return True if this call is struck."""
        return (
            number >= self.first
            and (self.last is None or number <= self.last)
            and (number - self.first) % self.every == 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Where several strike one call, they act in the order in which they were given.

    A fault whose row, element or earlier result does not exist in a call does not strike it.

    Attributes:
        op: identifier of an op ("attention.sparse"), or "device.allocate" or "device.synchronize"; ``*`` and ``?``
            stand for any text and any character ("codec.store_*").
        kind: what goes wrong.
        calls: when.
        part: which tensor is hit by VALUE, NAN and BIT: "result", a field of it ("result.entries_TK"), a parameter
            ("slot_T"), or a field of a parameter ("step.position_T"). Parameters are changed on a copy, before
            the call, so what the op writes into a changed parameter is lost. Ops that store can be struck only
            through a parameter.
        row: index in the first dimension; None for anywhere.
        element: flat index inside the row (or the tensor); None lets the driver's seed choose.
        amount: for VALUE, in the tensor's own unit.
        bit: for BIT, 0 is the lowest of the element.
        delay_s: for DELAY.
        calls_ago: for STALE; a layer's own earlier result is as many calls ago as the op is called per step.
    """

    op: str
    kind: FaultKind
    calls: Calls = Calls()
    part: str = RESULT
    row: int | None = None
    element: int | None = None
    amount: float = 1.0
    bit: int = 0
    delay_s: float = 0.0
    calls_ago: int = 1

    def __post_init__(self) -> None:
        known = (*all_op_names(), *DEVICE_CALLS)
        problems = []
        if not any(self.strikes(name) for name in known):
            problems.append(f"op {self.op!r} is no op of the contract; known: {', '.join(known)}")
        if self.part != RESULT and not self.in_tensor:
            problems.append(f"part {self.part!r} has no meaning for kind {str(self.kind)!r}; leave it out")
        if self.amount == 0:
            problems.append("amount 0 changes nothing; give another")
        if self.bit < 0 or self.delay_s < 0 or min(self.row or 0, self.element or 0) < 0:
            problems.append("row, element, bit and delay_s are not negative")
        if self.calls_ago < 1:
            problems.append(f"calls_ago {self.calls_ago} is no earlier call; give 1 or more")
        if problems:
            raise ArgumentError("Fault", problems)

    @property
    def in_tensor(self) -> bool:
        """True for kinds that change an element of a tensor."""
        return self.kind in _IN_TENSORS

    def strikes(self, op: str) -> bool:
        """Return True if the fault concerns this op."""
        return fnmatchcase(op, self.op)


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that happened.

    Attributes:
        op: identifier of the op that was called.
        call: number of the call.
        fault: what was asked for.
        element: flat index of the changed element in its tensor; None for kinds without one.
    """

    op: str
    call: int
    fault: Fault
    element: int | None = None
