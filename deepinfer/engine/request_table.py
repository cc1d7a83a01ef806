"""The engine's requests, from their admission until their last record has been handed out."""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.engine.answers import Answer, Request
from deepinfer.engine.outputs import RequestOutput
from deepinfer.errors import DuplicateRequestError, InvariantError
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.step import TerminalRecord


class RequestTable:
    """Requests by id, their living answers by the id that the scheduler knows, and whose records are due."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._answers: dict[str, Answer] = {}
        self._due: dict[str, Request] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_unfinished(self) -> int:
        """Answers whose terminal record has not been handed out; a refused request counts as one."""
        return sum(max(1, len(request.living())) for request in self._requests.values())

    @property
    def living_ids(self) -> list[str]:
        """The scheduler's ids of all answers without a terminal record."""
        return [answer.sequence_id for request in self._requests.values() for answer in request.living()]

    def find(self, request_id: str) -> Request | None:
        """Return the request of that id, None if there is none or its last record has been handed out."""
        return self._requests.get(request_id)

    def answer(self, sequence_id: str) -> Answer:
        """Return a living answer."""
        return self._answers[sequence_id]

    def refuse_duplicates(self, ids: Iterable[str]) -> None:
        """Raise DuplicateRequestError if one of the ids belongs to a request or to a sibling that is alive."""
        for identifier in ids:
            if identifier in self._requests or identifier in self._answers:
                raise DuplicateRequestError(
                    f"request id {identifier!r} is alive until its terminal record has come out of step(); "
                    f"run step(), or use another id"
                )

    def add(self, request: Request) -> None:
        """Take a request whose ids are free; the record of a refused one is due at once."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self._requests[request.request_id] = request
        for answer in request.answers:
            self._answers[answer.sequence_id] = answer
        if request.refusal is not None:
            self._due[request.request_id] = request

    def note_growth(self, answer: Answer) -> None:
        """Remember that a record of this answer's request is due."""
        self._due[answer.request_id] = self._requests[answer.request_id]

    def finish(self, terminals: Iterable[TerminalRecord]) -> None:
        """End the answers that the scheduler reports as ended."""
        for terminal in terminals:
            answer = self._answers.pop(terminal.request_id)
            answer.finish(terminal)
            self.note_growth(answer)

    def abort_all(self, text: str) -> None:
        """End every living answer, for a scheduler that no longer knows them."""
        self._answers.clear()
        for request in self._requests.values():
            for answer in request.living():
                answer.finish(answer.end_unscheduled(Status.FINISHED_ABORTED, text))
            self._due[request.request_id] = request

    def take_records(self) -> list[RequestOutput]:
        """Hand out the records that are due, in the order of admission, and forget the requests that ended."""
        due = sorted(self._due.values(), key=lambda request: request.arrival)
        records = [request.output() for request in due]
        for record in records:
            if record.finished:
                del self._requests[record.request_id]
        self._due.clear()
        return records

    def discard(self, requests: Iterable[Request]) -> None:
        """Forget requests and the records of them that are due."""
        for request in requests:
            self._requests.pop(request.request_id, None)
            self._due.pop(request.request_id, None)
            for answer in request.answers:
                self._answers.pop(answer.sequence_id, None)

    def check_invariants(self, scheduled_ids: Iterable[str]) -> None:
        """Raise InvariantError, naming everything that is wrong, unless these are the ids of all living answers.

        The terminal records of the scheduler must have been given to :meth:`finish` before.
        """
        living, listed, scheduled = set(self.living_ids), set(self._answers), set(scheduled_ids)
        problems = []
        if living != listed:
            problems.append(f"answers {sorted(living ^ listed)} are living, or listed as living, but not both")
        if living != scheduled:
            problems.append(f"answers {sorted(living ^ scheduled)} are living here or in the scheduler, not in both")
        lost = [name for name, request in self._requests.items() if request.is_finished and name not in self._due]
        if lost:
            problems.append(f"requests {lost} have ended, but no record of them is due")
        if problems:
            raise InvariantError("requests: " + "; ".join(problems))
