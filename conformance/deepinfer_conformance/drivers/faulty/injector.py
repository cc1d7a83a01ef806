"""Carrying faults out, call by call."""

from __future__ import annotations

import inspect
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import torch

from deepinfer.errors import ArgumentError
from deepinfer_conformance.drivers.faulty.faults import RESULT, Fault, FaultKind, InjectedFaultError, Strike
from deepinfer_conformance.drivers.faulty.tensors import kept, same_shapes, spoil


@dataclass(frozen=True, slots=True)
class Target:
    """A function that can be struck.

    Attributes:
        op: its identifier.
        function: what really computes.
        signature: of the contract, so that parameters can be named.
    """

    op: str
    function: Callable[..., object]
    signature: inspect.Signature

    @property
    def returns_nothing(self) -> bool:
        """True for ops that only write memory."""
        return self.signature.return_annotation in (None, "None")


class Injector:
    """Counts calls and strikes them; the same seed, faults and calls give the same strikes.

    Calls may come from several threads (weights are prepared that way); they are then numbered as they arrive.
    """

    def __init__(self, faults: Sequence[Fault], seed: int, sleep: Callable[[float], None]) -> None:
        self._faults = tuple(faults)
        self._seed = seed
        self._sleep = sleep
        self._lock = Lock()
        self._calls: Counter[str] = Counter()
        self._strikes: list[Strike] = []
        self._earlier: dict[str, deque[object]] = {}

    @property
    def strikes(self) -> tuple[Strike, ...]:
        """Everything that was struck so far, in order."""
        with self._lock:
            return tuple(self._strikes)

    def calls(self, op: str) -> int:
        """Return how often an op was called."""
        with self._lock:
            return self._calls[op]

    def call(self, target: Target, args: tuple[object, ...], keywords: Mapping[str, object]) -> object:
        """Call the function as the faults want it."""
        with self._lock:
            self._calls[target.op] += 1
            number = self._calls[target.op]
        concerned = [(place, fault) for place, fault in enumerate(self._faults) if fault.strikes(target.op)]
        if not concerned:
            return target.function(*args, **keywords)
        due = [(place, fault) for place, fault in concerned if fault.calls.include(number)]
        self._before(target.op, number, [fault for _, fault in due])

        bound = target.signature.bind(*args, **keywords)
        for place, fault in due:
            name, *fields = fault.part.split(".")
            if not fault.in_tensor or name == RESULT:
                continue
            chance = self._chance(place, target.op, number)
            spoiled = spoil(_argument(bound, name, fault), tuple(fields), fault, chance)
            if spoiled is not None:
                bound.arguments[name] = spoiled.value
                self._note(Strike(target.op, number, fault, spoiled.element))

        stale = [fault for _, fault in due if fault.kind is FaultKind.STALE]
        if stale and target.returns_nothing:
            self._note(Strike(target.op, number, stale[0]))
            return None
        result = target.function(*bound.args, **bound.kwargs)
        lags = [fault.calls_ago for _, fault in concerned if fault.kind is FaultKind.STALE]
        if lags:
            result = self._aged(target.op, number, result, stale, max(lags))
        for place, fault in due:
            name, *fields = fault.part.split(".")
            if not fault.in_tensor or name != RESULT:
                continue
            spoiled = spoil(result, tuple(fields), fault, self._chance(place, target.op, number))
            if spoiled is not None:
                result = spoiled.value
                self._note(Strike(target.op, number, fault, spoiled.element))
        return result

    def _before(self, op: str, number: int, due: Sequence[Fault]) -> None:
        for fault in due:
            match fault.kind:
                case FaultKind.DELAY:
                    self._note(Strike(op, number, fault))
                    self._sleep(fault.delay_s)
                case FaultKind.RAISE:
                    self._note(Strike(op, number, fault))
                    raise InjectedFaultError(f"fault injected into {op!r}, call {number}; it was asked for by {fault}")
                case FaultKind.OUT_OF_MEMORY:
                    self._note(Strike(op, number, fault))
                    raise torch.OutOfMemoryError(f"out of memory injected into {op!r}, call {number}")
                case _:
                    continue

    def _aged(self, op: str, number: int, result: object, stale: Sequence[Fault], longest: int) -> object:
        """Remember the result, and return an earlier one if a fault wants it."""
        with self._lock:
            earlier = self._earlier.setdefault(op, deque(maxlen=longest + 1))
            earlier.append(kept(result))
            known = list(earlier)
        for fault in stale:
            if fault.calls_ago < len(known) and same_shapes(known[-1 - fault.calls_ago], result):
                self._note(Strike(op, number, fault))
                result = kept(known[-1 - fault.calls_ago])
        return result

    def _chance(self, place: int, op: str, number: int) -> random.Random:
        return random.Random(f"{self._seed}/{place}/{op}/{number}")

    def _note(self, strike: Strike) -> None:
        with self._lock:
            self._strikes.append(strike)


def _argument(bound: inspect.BoundArguments, name: str, fault: Fault) -> object:
    bound.apply_defaults()
    if name not in bound.arguments:
        known = ", ".join((RESULT, *bound.arguments))
        raise ArgumentError(f"fault in {fault.op!r}", [f"part {fault.part!r} is unknown; this op has {known}"])
    return bound.arguments[name]
