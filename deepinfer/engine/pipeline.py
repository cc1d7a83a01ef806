"""Steps in flight: planned -> launched -> completed -> committed.

The host plans a step, hands its layers to the device's queue, and only then reads the step before it. The sampling of
the step is handed over after that, so that penalties, bans, forced tokens and forms are those of committed tokens: the
host never guesses a token. What the layers need of the step before (where each request stands, its newest token, its
drafts) the worker takes from the device.

=========== =====================================================================================================
planned     the scheduler has given it rows and memory; nothing runs
launched    :meth:`Pipeline.launch`: the layers are in the queue; :meth:`Pipeline.judge`: the sampling too
completed   :meth:`Pipeline.read` has waited for it
committed   the engine has taken its tokens; memory that waited for it is free
=========== =====================================================================================================
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from deepinfer.accelerator import Event, Stream
from deepinfer.engine.answers import Answer
from deepinfer.engine.outputs import StepTimes
from deepinfer.engine.readback import Results
from deepinfer.engine.worker import Worker
from deepinfer.sampling.verification import RunRequest, VerifiedRun
from deepinfer.scheduling.step import ScheduledStep

Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class Flight:
    """One launched step.

    Attributes:
        step: the step.
        answers: whose rows they are; some may have ended since.
        marks: the ends of what was handed to the queue for it.
        begun: what its layers left for the sampling, once they have run; the worker's own affair.
        results: its results, readable when the last mark was waited for.
        error: what its work has raised; a step behind it raises the same, because it would compute with nothing.
    """

    step: ScheduledStep
    answers: Sequence[Answer]
    marks: list[Event]
    begun: Any = None
    results: Results | None = None
    error: BaseException | None = None


class Pipeline:
    """The device's queue and the steps in it, oldest first: one between two calls of the engine, two within a call."""

    def __init__(self, stream: Stream, clock: Clock = time.perf_counter) -> None:
        self._stream = stream
        self._clock = clock
        self._flights: deque[Flight] = deque()
        # Drafts of each row of the sequence table, with the occupation that they belong to.
        self._drafts: dict[int, tuple[int, list[int]]] = {}
        self._waited_s = 0.0
        self._device_s: float | None = 0.0

    @property
    def oldest(self) -> Flight | None:
        """The step that must be read next."""
        return self._flights[0] if self._flights else None

    def times(self, called_s: float) -> StepTimes:
        """Return what the steps cost so far; ``called_s`` is how long the engine's calls took altogether."""
        return StepTimes(called_s, self._waited_s, self._device_s)

    def launch(self, worker: Worker, step: ScheduledStep, answers: Sequence[Answer]) -> Flight:
        """Hand the copies and the layers of a step to the queue."""
        before = self._flights[-1] if self._flights else None
        flight = Flight(step, answers, [])
        self._flights.append(flight)

        def begin() -> None:
            if before is not None and before.error is not None:
                raise before.error
            flight.begun = worker.begin(step, [answer.extras for answer in answers])

        flight.marks.append(self._stream.enqueue(_reporting(flight, begin)))
        return flight

    def judge(self, worker: Worker, flight: Flight, requests: Sequence[RunRequest]) -> None:
        """Hand the sampling of a step to the queue; the steps before it have been committed."""

        def finish() -> None:
            if flight.error is not None:
                return  # the first mark raises it
            begun, flight.begun = flight.begun, None
            extras = [answer.extras for answer in flight.answers]
            flight.results = worker.finish(begun, flight.step, requests, extras, self._stream.to_host)

        flight.marks.append(self._stream.enqueue(_reporting(flight, finish)))

    def drafts(self, step: ScheduledStep, lengths: Sequence[int]) -> list[list[int]]:
        """Return the drafts that each request of a step verifies, up to the first placeholder.

        Args:
            step: the step; everything before it has been read.
            lengths: tokens of each request: drafts behind the last planned position are none.
        """
        if step.kind != "decode":
            return [[] for _ in lengths]
        rows = zip(step.table_row_R.tolist(), step.epoch_R.tolist(), step.q_R.tolist(), step.k_R.tolist(), strict=True)
        found = []
        for (row, epoch, q, k), length in zip(rows, lengths, strict=True):
            owner, ids = self._drafts.get(row, (epoch, []))
            most = max(0, min(q - 1, k - length))
            usable = ids[:most] if owner == epoch else []
            found.append(list(takewhile(lambda token_id: token_id >= 0, usable)))
        return found

    def read(self) -> tuple[Flight, list[VerifiedRun]]:
        """Wait for the oldest step and return it, completed, with what each request emits.

        Whatever its work has raised comes out of here, and the step stays in flight: see :meth:`give_up`. A step that
        was never sampled, because all its requests had ended, emits nothing.
        """
        flight = self._flights[0]
        begun = self._clock()
        try:
            for mark in flight.marks:
                mark.wait()
            runs = [] if flight.results is None else flight.results.runs()
        finally:
            self._waited_s += self._clock() - begun
        self._flights.popleft()
        self._count_device_time(flight)
        drafts = None if flight.results is None else flight.results.next_drafts()
        if drafts is not None:
            owners = zip(flight.step.table_row_R.tolist(), flight.step.epoch_R.tolist(), drafts, strict=True)
            self._drafts.update({row: (epoch, ids) for row, epoch, ids in owners})
        return flight, runs

    def give_up(self, step: ScheduledStep) -> list[ScheduledStep]:
        """Take a step and those behind it out of the queue, once nothing of them runs; return them, oldest first."""
        steps = [flight.step for flight in self._flights]
        index = steps.index(step) if step in steps else len(steps)  # it may not have come as far as the queue
        self._wait_for_end(list(self._flights)[index:])
        for _ in steps[index:]:
            self._flights.pop()
        return steps[index:] or [step]

    def abandon(self) -> None:
        """Wait until nothing runs, and forget everything."""
        self._wait_for_end(list(self._flights))
        self._flights.clear()
        self._drafts.clear()

    def close(self) -> None:
        """End what the queue holds, its thread for one; steps in flight stay readable, and it can be used again."""
        self._stream.close()

    def _wait_for_end(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            for mark in flight.marks:
                try:
                    mark.wait()
                except BaseException as error:
                    # What its work has raised was told, or belongs to a step that nobody reads; Ctrl-C goes through.
                    if error is not flight.error and not isinstance(error, Exception):
                        raise
        # A call that was cut off may have left work in the queue without a mark of its own.
        self._stream.record_event().wait()

    def _count_device_time(self, flight: Flight) -> None:
        for mark in flight.marks:
            elapsed_s = mark.elapsed_s
            self._device_s = None if elapsed_s is None or self._device_s is None else self._device_s + elapsed_s


def _reporting(flight: Flight, work: Callable[[], None]) -> Callable[[], None]:
    """Return work that also tells its flight what it has raised."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            flight.error = error
            raise

    return run
