"""Requests that many ranks have and one caller: which ids are free, and the last record of who will not be finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from deepinfer.engine.admission import AdmissionRules, Submission
from deepinfer.engine.answers import sequence_ids
from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.errors import DuplicateRequestError
from deepinfer.sampling.limits import SamplingLimits


class Submitted(Protocol):
    """A request whose terminal record has not come."""

    @property
    def submission(self) -> Submission:
        """What the caller passed."""


def ids_of(submission: Submission, rules: AdmissionRules) -> list[str]:
    """Return the ids that a request takes: its own and its siblings'; one that will be refused has no siblings."""
    if rules.refusals(submission):
        return [submission.request_id]
    return [submission.request_id, *sequence_ids(submission.request_id, submission.params.n)]


def refuse_duplicates(ids: Iterable[str], living: Mapping[str, Submitted]) -> None:
    """Raise DuplicateRequestError if one of the ids is that of a living request or of a sibling in one.

    Ranks that do not serve the request have no books in which it could be found, and must decide alike.
    """
    for identifier in ids:
        if identifier in living or _is_sibling(identifier, living):
            raise DuplicateRequestError(
                f"request id {identifier!r} is alive until its terminal record has come out of step(); "
                f"run step(), or use another id"
            )


def _is_sibling(identifier: str, living: Mapping[str, Submitted]) -> bool:
    owner, _, index = identifier.rpartition("/")
    most = living[owner].submission.params.n if owner in living else 1
    is_number = index.isascii() and index.isdigit() and len(index) <= len(str(most)) and index == str(int(index))
    return most > 1 and is_number and int(index) < most


def given_up_record(submission: Submission, latest: RequestOutput | None, why: str) -> RequestOutput:
    """Return the terminal record of a request: what it had so far, and why it ended.

    Args:
        submission: what the caller passed.
        latest: its newest record; None for one that has none, or has it on another rank.
        why: for the answers that are unfinished.
    """
    if latest is None:
        wanted = submission.params.n  # it may never have been looked at by who would have refused it
        count = wanted if 1 <= wanted <= SamplingLimits().choices else 1
        outputs = tuple(CompletionOutput(index, "", (), None, "abort", message=why) for index in range(count))
        return RequestOutput(
            submission.request_id, submission.prompt, submission.prompt_token_ids, None, outputs, finished=True
        )
    outputs = tuple(
        answer if answer.finished() else replace(answer, finish_reason="abort", stop_reason=None, message=why)
        for answer in latest.outputs
    )
    return replace(latest, outputs=outputs, finished=True)
