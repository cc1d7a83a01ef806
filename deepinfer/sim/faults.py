"""A worker whose device fails when it is told to: before, during or after the work of a step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from deepinfer.engine.handing_out import HandedOut
from deepinfer.engine.readback import Results, ToHost
from deepinfer.engine.worker import RowExtras, Worker
from deepinfer.errors import DeepInferError
from deepinfer.sampling.verification import RunRequest, VerifiedRun
from deepinfer.scheduling.step import ScheduledStep


class SimulatedFaultError(DeepInferError):
    """The fault that the simulation injected; nothing else raises it."""


class FaultPlace(StrEnum):
    """Where in a step the device fails."""

    COPY = "copy"
    BEFORE = "before"
    AFTER = "after"


class FailingWorker(Worker):
    """Raises once at the next step when ``armed`` is set; what the step had written by then stays written."""

    armed: FaultPlace | None = None

    def copy(self, step: ScheduledStep) -> None:
        """Execute copies, or fail before them."""
        self._fail_at(FaultPlace.COPY)
        super().copy(step)

    def run(
        self, step: ScheduledStep, requests: Sequence[RunRequest], extras: Sequence[RowExtras]
    ) -> list[VerifiedRun]:
        """Run a step, or fail before it, or after everything was written and before anything was read."""
        self._fail_at(FaultPlace.BEFORE)
        runs = super().run(step, requests, extras)
        self._fail_at(FaultPlace.AFTER)
        return runs

    def hand_out(self, step: ScheduledStep, to_host: ToHost) -> HandedOut:
        """Share out the rows of a step, or fail before that."""
        self._fail_at(FaultPlace.BEFORE)
        return super().hand_out(step, to_host)

    def begin(self, step: ScheduledStep, extras: Sequence[RowExtras], handed: HandedOut | None = None) -> Any:
        """Begin a step, or fail before anything of it was done."""
        self._fail_at(FaultPlace.BEFORE)
        return super().begin(step, extras, handed)

    def finish(
        self,
        begun: Any,
        step: ScheduledStep,
        requests: Sequence[RunRequest],
        extras: Sequence[RowExtras],
        to_host: ToHost,
    ) -> Results:
        """Finish a step, or fail after everything was written and before anything was read."""
        results = super().finish(begun, step, requests, extras, to_host)
        self._fail_at(FaultPlace.AFTER)
        return results

    def _fail_at(self, place: FaultPlace) -> None:
        if self.armed is place:
            self.armed = None
            raise SimulatedFaultError(f"the simulated device failed ({place.value})")
