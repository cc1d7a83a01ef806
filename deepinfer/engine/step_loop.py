"""One step after the other: planned by the scheduler, computed by the worker, committed to the books.

A driver's fault ends the requests of its step, a call that was cut off while it wrote all (:meth:`StepLoop.repair`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deepinfer.engine.answers import Answer
from deepinfer.engine.books import Books
from deepinfer.engine.outputs import StepTimes
from deepinfer.engine.pipeline import Pipeline
from deepinfer.engine.runs import asked_runs, taken_runs
from deepinfer.engine.worker import Worker
from deepinfer.errors import RankFailedError
from deepinfer.parallel.ranks.groups import RankGroups
from deepinfer.sampling.verification import RunRequest, VerifiedRun
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.scheduling.table import NO_TOKEN

_LOG = logging.getLogger(__name__)
_LONGEST_WAIT_S = 0.05  # for a form, when nothing else is to be done


class StepLoop:
    """The steps of an engine.

    Attributes:
        worker: computes.
        pipeline: the steps in flight; None where each is read before the next is planned.
        last_step: the newest step that was planned, or the one that has failed; None before the first.
        steps: how many were planned.
        emitted_tokens: tokens that answers have taken.
        drafted_tokens: drafts that were verified.
        accepted_tokens: drafts that were accepted.
    """

    def __init__(
        self,
        books: Books,
        worker: Worker,
        pipeline: Pipeline | None,
        config: SchedulerConfig,
        ranks: RankGroups | None = None,
    ) -> None:
        """Begin before the first step; ``ranks`` take part in every step."""
        self.worker = worker
        self.pipeline = pipeline
        self.last_step: ScheduledStep | None = None
        self.steps = self.emitted_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self._books = books
        self._config = config
        self._ranks = ranks
        self._computed_s = 0.0

    def times(self, called_s: float) -> StepTimes:
        """Return what the steps cost so far; ``called_s`` is how long the engine's calls took altogether."""
        if self.pipeline is None:
            return StepTimes(called_s, self._computed_s, self._computed_s)
        return self.pipeline.times(called_s)

    def advance(self) -> None:
        """Run one step; planned ahead, the one that is committed is the one before."""
        if self.pipeline is None:
            self._step_alone()
        else:
            self._step_ahead(self.pipeline)

    def settle(self) -> bool:
        """Wait for the oldest step in flight and commit it; False if there is none."""
        pipeline = self.pipeline
        if pipeline is None or pipeline.oldest is None:
            return False
        with self._computing(pipeline.oldest.step):
            flight, runs = pipeline.read()
        self._commit(flight.step, flight.answers, flight.requests, runs)
        return True

    def repair(self) -> None:
        """Give up every request if an earlier call was cut off half-way: nobody can trust the books.

        Raises:
            RankFailedError: a fresh scheduler would vote otherwise than those of the other ranks.
        """
        if self._books.can_be_trusted:
            return
        if self._ranks is not None:
            raise RankFailedError([self._ranks.rank], "a call was cut off while it kept its books")
        self._begin_anew("the engine was interrupted while it kept its books; every request was given up")

    def give_up(self, text: str) -> None:
        """End every request, because the other ranks are lost: no step can be run any more.

        What the device raises, which may be what the ranks were lost by, is logged: there is nothing left to be ended.
        """
        if self._books.can_be_trusted:
            self._books.collect_terminals()  # who has ended by itself is not aborted
        try:
            self._begin_anew(text)
        except Exception:  # noqa: BLE001 - a device that has failed may say anything
            _LOG.exception("giving up: the device cannot be waited for")
            self._books.begin_anew(text)

    def close(self) -> None:
        """End what the device's queue holds."""
        if self.pipeline is not None:
            self.pipeline.close()

    # ------------------------------------------------------------------------------------------------------------

    def _begin_anew(self, text: str) -> None:
        if self.pipeline is not None:
            self.pipeline.abandon()
        self.worker.forget()
        self._books.begin_anew(text)

    def _step_alone(self) -> None:
        """Plan a step, run it and commit it."""
        step = self._planned(self._books.scheduler.schedule())
        if step.kind == "empty":  # it carries no copies either
            self._stand_by()
            return
        answers = self._books.answers(step)
        with self._computing(step):
            begun = time.perf_counter()
            self.worker.copy(step)
            drafts = self.worker.drafts(step)
            asked = asked_runs(step, answers, drafts, (step.cached_R + 1).tolist(), (~step.is_partial_R).tolist())
            self.drafted_tokens += asked.drafted_tokens
            self.worker.plan_round(step)
            runs = self.worker.run(step, asked.requests, [each.extras for each in answers])
            self._computed_s += time.perf_counter() - begun
        self._commit(step, answers, asked.requests, runs)

    def _step_ahead(self, pipeline: Pipeline) -> None:
        """Plan a step and launch its layers, read and commit the step before it, launch its sampling.

        A prompt step is read at once, and so is a step that nobody waits for: its memory goes back.
        """
        scheduler = self._books.scheduler
        step = self._planned(scheduler.schedule(self.settle))
        if step.kind == "empty":
            if not self.settle() or self._ranks is not None:
                self._stand_by()
            return
        answers = self._books.answers(step)
        with self._computing(step):
            flight = pipeline.launch(self.worker, step, answers)
        while pipeline.oldest is not flight:
            self.settle()
        if scheduler.current_rows(step).any():
            lengths = scheduler.lengths(step)
            with self._computing(step):
                drafts = pipeline.drafts(flight, lengths)
                asked = asked_runs(step, answers, drafts, lengths, scheduler.due_rows(step).tolist())
                self.drafted_tokens += asked.drafted_tokens
                self.worker.plan_round(step)
                pipeline.judge(self.worker, flight, asked.requests)
        if step.kind == "prefill" or not scheduler.has_unfinished():
            self.settle()

    def _planned(self, step: ScheduledStep) -> ScheduledStep:
        self.last_step = step
        self.steps += 1
        return step

    def _stand_by(self) -> None:
        """Spend a step without rows: wait for a form, or take part in the step of the other ranks."""
        if self._ranks is None:
            self._books.forms.wait(_LONGEST_WAIT_S)
        else:
            self.worker.stand_by()

    def _commit(
        self,
        step: ScheduledStep,
        answers: Sequence[Answer],
        requests: Sequence[RunRequest],
        runs: Sequence[VerifiedRun],
    ) -> None:
        scheduler = self._books.scheduler
        # Somebody may have ended while the step ran; the result of an unfinished chunk is thrown away.
        is_due = scheduler.due_rows(step).tolist()
        emitted, failures, accepted = taken_runs(step, answers, requests, runs, is_due, self._config.max_model_len)
        self.accepted_tokens += accepted
        if self._config.num_speculative_tokens:
            scheduler.commit_runs(step, emitted, failures)
        else:
            scheduler.commit(step, [taken[-1] if taken else NO_TOKEN for taken in emitted], failures)
        for answer, taken in zip(answers, emitted, strict=True):
            if taken:
                self.emitted_tokens += len(taken)
                self._books.note_growth(answer)

    @contextmanager
    def _computing(self, step: ScheduledStep) -> Iterator[None]:
        """Give up a step whose part on the device raises, and those behind it, which would have read its results.

        The requests of the first of them end; what else they carried, forks' copies too, is computed anew.
        """
        with self._books.away():
            try:
                yield
            except BaseException as error:
                lost = [step] if self.pipeline is None else self.pipeline.give_up(step)
                self.last_step = lost[0]
                self._books.end_failed(lost[0], f"the step failed: {type(error).__name__}: {error}")
                for each in lost:
                    self._books.scheduler.cancel(each)
                self._books.is_torn = False
                raise
