"""Steps in flight: planned -> launched -> completed -> committed.

The host plans a step, hands its layers to the device's queue, and only then reads the step before it. The sampling of
the step is handed over after that, so that penalties, bans, forced tokens and forms are those of committed tokens: the
host never guesses a token. What the layers need of the step before (where each request stands, its newest token, its
drafts) the worker takes from the device.

=========== =====================================================================================================
planned     the scheduler has given it rows and memory; nothing runs
launched    :meth:`Pipeline.launch`: the layers are in the queue, and before them, where lengths of verification vary,
            the handing out of its rows; :meth:`Pipeline.judge`: the sampling too
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

import numpy as np
from numpy.typing import NDArray

from deepinfer.accelerator import Event, Stream
from deepinfer.engine.answers import Answer
from deepinfer.engine.handing_out import HandedOut
from deepinfer.engine.outputs import StepTimes
from deepinfer.engine.readback import Results
from deepinfer.engine.verify_lengths import VerifyLengths
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
        handing: the end of the handing out of its rows; None where they are as planned.
        handed: what came of that.
        requests: what its sampling was asked; nothing before that, and where all its requests had ended.
        begun: what its layers left for the sampling, once they have run; the worker's own affair.
        results: its results, readable when the last mark was waited for.
        error: what its work has raised; a step behind it raises the same, because it would compute with nothing.
    """

    worker: Worker
    step: ScheduledStep
    answers: Sequence[Answer]
    marks: list[Event]
    handing: Event | None = None
    handed: HandedOut | None = None
    requests: Sequence[RunRequest] = ()
    begun: Any = None
    results: Results | None = None
    error: BaseException | None = None


class Pipeline:
    """The device's queue and the steps in it, oldest first: one between two calls of the engine, two within a call."""

    def __init__(self, stream: Stream, lengths: VerifyLengths | None = None, clock: Clock = time.perf_counter) -> None:
        """Begin with nothing in flight; ``lengths`` learn the chances that are read, None where lengths are fixed."""
        self._stream = stream
        if lengths is not None:
            lengths.learn_chances_from(self.chances)
        self._clock = clock
        self._flights: deque[Flight] = deque()
        # Drafts of each row of the sequence table, with the occupation that they belong to.
        self._drafts: dict[int, tuple[int, list[int]]] = {}
        self._chances: dict[int, tuple[int, NDArray[np.float64]]] = {}
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
        flight = Flight(worker, step, answers, [])
        self._flights.append(flight)

        def follow() -> None:
            if before is not None and before.error is not None:
                raise before.error

        def hand_out() -> None:
            follow()
            flight.handed = worker.hand_out(step, self._stream.to_host)

        def begin() -> None:
            if flight.error is None:  # else the first mark raises it
                follow()
                flight.begun = worker.begin(step, [answer.extras for answer in answers], flight.handed)

        if worker.hands_out(step):
            flight.handing = self._stream.enqueue(_reporting(flight, hand_out))
            flight.marks.append(flight.handing)
        flight.marks.append(self._stream.enqueue(_reporting(flight, begin)))
        return flight

    def judge(self, worker: Worker, flight: Flight, requests: Sequence[RunRequest]) -> None:
        """Hand the sampling of a step to the queue; the steps before it have been committed."""
        flight.requests = requests

        def finish() -> None:
            if flight.error is not None:
                return  # the first mark raises it
            begun, flight.begun = flight.begun, None
            extras = [answer.extras for answer in flight.answers]
            flight.results = worker.finish(begun, flight.step, requests, extras, self._stream.to_host)

        flight.marks.append(self._stream.enqueue(_reporting(flight, finish)))

    def drafts(self, flight: Flight, lengths: Sequence[int]) -> list[list[int]]:
        """Return the drafts that each request of a step verifies, up to the first placeholder.

        Where its rows were handed out by the device, the step learns how.

        Args:
            flight: the step; everything before it has been read.
            lengths: tokens of each request: drafts behind the last planned position are none.
        """
        step = flight.step
        if step.kind != "decode":
            return [[] for _ in lengths]
        if flight.handing is not None:
            begun = self._clock()
            flight.handing.wait()  # its work comes right behind that of the step before
            self._waited_s += self._clock() - begun
            if flight.handed is not None:
                step.hand_out(flight.handed.drafts_R.numpy())
        rows = zip(step.table_row_R.tolist(), step.epoch_R.tolist(), step.q_R.tolist(), step.k_R.tolist(), strict=True)
        found = []
        for (row, epoch, q, k), length in zip(rows, lengths, strict=True):
            owner, ids = self._drafts.get(row, (epoch, []))
            most = max(0, min(q - 1, k - length))
            usable = ids[:most] if owner == epoch else []
            found.append(list(takewhile(lambda token_id: token_id >= 0, usable)))
        return found

    def chances(self, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the cumulative chances [R, n] that were read last for rows; 0 where there are none of theirs."""
        drafts = next((len(chances_n) for _, chances_n in self._chances.values()), 0)
        chances_Rn = np.zeros((len(rows_R), drafts))
        for number, (row, epoch) in enumerate(zip(rows_R.tolist(), epoch_R.tolist(), strict=True)):
            owner, chances_n = self._chances.get(row, (None, None))
            if owner == epoch and chances_n is not None:
                chances_Rn[number] = chances_n
        return chances_Rn

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
        if flight.results is not None:
            self._remember(flight, flight.results)
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
        self._chances.clear()

    def close(self) -> None:
        """End what the queue holds, its thread for one; steps in flight stay readable, and it can be used again."""
        self._stream.close()

    def _remember(self, flight: Flight, results: Results) -> None:
        """Keep what a step has drafted, and learn what it took."""
        drafts = results.next_drafts()
        owners = list(zip(flight.step.table_row_R.tolist(), flight.step.epoch_R.tolist(), strict=True))
        if drafts is not None:
            self._drafts.update({row: (epoch, ids) for (row, epoch), ids in zip(owners, drafts, strict=True)})
        if drafts is not None and flight.worker.lengths is not None:
            given = zip(owners, results.next_chances(), strict=True)
            self._chances.update({row: (epoch, chances_n) for (row, epoch), chances_n in given})
            layers_s, sampler_s = (mark.elapsed_s for mark in flight.marks[-2:])
            if layers_s is not None and sampler_s is not None:
                flight.worker.learn(flight.step, layers_s, sampler_s)

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
