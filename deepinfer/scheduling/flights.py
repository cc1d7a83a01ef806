"""Steps that were handed to the device and whose end the host has not seen, and what waits for that end.

A step is planned, launched, completed, committed. With asynchronous scheduling a request can end, or be aborted, while
a launched step still reads and writes its memory: what it owned goes back when the newest step that was launched by
then has completed. Without, a result is read before anything else happens, and memory goes back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.blocks import BlockId, BlockPool
from deepinfer.errors import InvariantError
from deepinfer.scheduling.step import ScheduledStep


@dataclass(slots=True)
class Held:
    """Ownerships that go back when a step has completed, in the order in which they were given up."""

    blocks: list[BlockId] = field(default_factory=list)
    slots: list[BlockId] = field(default_factory=list)


@dataclass(slots=True)
class _Flight:
    step: ScheduledStep
    held: Held


class Flights:
    """The launched steps, oldest first: one, or with asynchronous scheduling two for the time of one call."""

    def __init__(self, blocks: BlockPool, slots: BlockPool, *, defers: bool) -> None:
        self._blocks = blocks
        self._slots = slots
        self._defers = defers
        self._flights: list[_Flight] = []
        self._for_next = Held()

    @property
    def steps(self) -> list[ScheduledStep]:
        """The launched steps, oldest first."""
        return [flight.step for flight in self._flights]

    @property
    def oldest(self) -> ScheduledStep | None:
        """The step whose result is due."""
        return self._flights[0].step if self._flights else None

    @property
    def newest(self) -> ScheduledStep | None:
        """The step that was launched last."""
        return self._flights[-1].step if self._flights else None

    @property
    def held(self) -> Held:
        """Everything that waits for the end of some step."""
        every = [flight.held for flight in self._flights] + [self._for_next]
        return Held([block for held in every for block in held.blocks], [slot for held in every for slot in held.slots])

    def open(self, step: ScheduledStep) -> None:
        """Note that ``step`` is handed to the device."""
        self._flights.append(_Flight(step, self._for_next))
        self._for_next = Held()

    def close(self, step: ScheduledStep) -> None:
        """Note that ``step`` has completed, and give back what waited for that.

        Steps complete in the order of their launch. What a step held that was given up before an older one was read
        goes back with the older one.
        """
        steps = self.steps
        if step not in steps:
            raise InvariantError(f"step {step.number} is not in flight: it was committed or cancelled before")
        index = steps.index(step)
        held = self._flights.pop(index).held
        if index:
            self._flights[index - 1].held.blocks += held.blocks
            self._flights[index - 1].held.slots += held.slots
            return
        for block in held.blocks:
            self._blocks.free(block)
        for slot in held.slots:
            self._slots.free(slot)

    def give_back(self, blocks: NDArray[np.int64], slots: Sequence[BlockId]) -> None:
        """Give up blocks and slots, in the order given: now, or when no step can touch them."""
        if self._defers and self._flights:
            held = self._flights[-1].held
            held.blocks += blocks.tolist()
            held.slots += slots
            return
        self._blocks.free_many(blocks)
        for slot in slots:
            self._slots.free(slot)

    def keep_for_next(self, blocks: Sequence[BlockId], slots: Sequence[BlockId]) -> None:
        """Own these once more until the step that is opened next has completed: it copies from them."""
        if self._defers:
            for block in blocks:
                self._blocks.share(block)
            for slot in slots:
                self._slots.share(slot)
            self._for_next.blocks += blocks
            self._for_next.slots += slots
