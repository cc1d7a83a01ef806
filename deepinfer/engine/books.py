"""The books of an engine: its requests, their scheduler, and the mark of a call that was cut off while it wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from deepinfer.engine.answers import Answer, Request
from deepinfer.engine.forms import WaitingForms
from deepinfer.engine.request_table import RequestTable
from deepinfer.sampling.grammar import StructuredOutputs
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence as ScheduledSequence
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.step import ScheduledStep


class Books:
    """Three books that must agree: what the caller asked for, what the scheduler runs, what waits for a form.

    Attributes:
        scheduler: who runs when, in which memory.
        table: requests and answers until their last record has been handed out.
        forms: requests that the scheduler does not know yet.
        is_torn: a change that belongs together was begun and has not come to its end.
        preemptions: those of the answers that have ended.
    """

    def __init__(self, make_scheduler: Callable[[], Scheduler], forms: WaitingForms) -> None:
        """Open empty books."""
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
        self.table = RequestTable()
        self.forms = forms
        self.is_torn = False
        self.preemptions = 0
        self._is_away = False

    @property
    def can_be_trusted(self) -> bool:
        """Whether nothing was cut off; while the device computes, a call from inside finds the books in order."""
        return self._is_away or not self.is_torn

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the books as torn unless the block comes to its end."""
        before, self.is_torn = self.is_torn, True
        yield
        self.is_torn = before

    @contextmanager
    def away(self) -> Iterator[None]:
        """Note that the books lie in order, because the device computes; its faults are the caller's to book."""
        self._is_away = True
        try:
            yield
        finally:
            self._is_away = False

    def begin_anew(self, text: str) -> None:
        """End every request and start with a fresh scheduler."""
        self.table.abort_all(text)
        self.forms.clear()
        self.scheduler = self._make_scheduler()
        self.is_torn = False

    # --- requests in --------------------------------------------------------------------------------------------

    def add(
        self, request: Request, sequences: Sequence[ScheduledSequence], wanted: StructuredOutputs | None = None
    ) -> None:
        """Take a request; one with a form waits until that is compiled, a refused one has no sequences."""
        with self.changing():
            self.table.add(request)
            if sequences and wanted is not None:
                self.forms.hold(request, sequences, wanted)
                return
            for sequence in sequences:
                self.scheduler.add(sequence)

    def fork(self, parent_id: str, request: Request) -> None:
        """Take a request with one answer that continues from what its parent's answer holds."""
        (answer,) = request.answers
        with self.changing():
            self.table.add(request)
            self.scheduler.fork(parent_id, answer.sequence_id, answer.stop_rules)

    def schedule_prepared(self) -> None:
        """Hand the requests whose form is compiled to the scheduler; end those whose form cannot be."""
        for request, sequences, problem in self.forms.take_prepared():
            if problem:
                self._end_unscheduled(request, Status.FINISHED_GRAMMAR_FAILED, problem)
            else:
                for sequence in sequences:
                    self.scheduler.add(sequence)

    # --- requests out -------------------------------------------------------------------------------------------

    def abort(self, request: Request) -> bool:
        """End a request in whatever state it is; False if it has ended already."""
        with self.changing():
            if request.request_id in self.forms:
                self._end_unscheduled(request, Status.FINISHED_ABORTED, "")
                return True
            ended = [self.scheduler.abort(answer.sequence_id) for answer in request.living()]
        return any(ended)

    def discard(self, requests: Sequence[Request]) -> None:
        """End requests and drop their records."""
        self.forms.forget(request.request_id for request in requests)
        for request in requests:
            for answer in request.living():
                self.scheduler.abort(answer.sequence_id)
        self.collect_terminals()
        self.table.discard(requests)

    def end_failed(self, step: ScheduledStep, text: str) -> None:
        """End the requests of a step that has failed."""
        for sequence in step.sequences:
            if self.scheduler.find(sequence.request_id) is sequence:  # not a newer request of the same id
                self.scheduler.finish(sequence.request_id, Status.FINISHED_ABORTED, text=text)

    def note_growth(self, answer: Answer) -> None:
        """Note that an answer has taken tokens; one that they have ended, by its form or by its text, ends."""
        self.table.note_growth(answer)
        if answer.form_failure:
            self.scheduler.finish(answer.sequence_id, Status.FINISHED_GRAMMAR_FAILED, text=answer.form_failure)
        elif answer.found_stop is not None:
            self.scheduler.finish(answer.sequence_id, Status.FINISHED_STOPPED, answer.found_stop)

    def collect_terminals(self) -> None:
        """Take from the scheduler what has ended."""
        terminals = self.scheduler.take_terminals()
        self.preemptions += sum(terminal.preemptions for terminal in terminals)
        self.table.finish(terminals)

    # --- what can be seen ---------------------------------------------------------------------------------------

    def answers(self, step: ScheduledStep) -> list[Answer]:
        """Return whose rows the rows of a step are."""
        return [self.table.answer(sequence.request_id) for sequence in step.sequences]

    def all_preemptions(self) -> int:
        """Return the preemptions so far, those of living answers included."""
        living = [self.scheduler.find(sequence_id) for sequence_id in self.table.living_ids]
        return self.preemptions + sum(sequence.preemptions for sequence in living if sequence is not None)

    def check_invariants(self) -> None:
        """Raise InvariantError if the books contradict each other, or memory contradicts them."""
        self.scheduler.check_invariants()
        with self.changing():
            self.collect_terminals()
        scheduled = [sequence.request_id for sequence in self.scheduler.roster]
        self.table.check_invariants([*scheduled, *self.forms.sequence_ids])

    def _end_unscheduled(self, request: Request, status: Status, text: str) -> None:
        self.forms.forget([request.request_id])
        self.table.finish([answer.end_unscheduled(status, text) for answer in request.living()])
