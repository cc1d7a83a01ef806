"""Rows of a step without a token, and how each of their requests ends."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer.engine.answers import Answer
from deepinfer.sampling.sampler import SampledRow
from deepinfer.scheduling.commit import RowFailure
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.step import ScheduledStep

_INVALID = {
    RowStatus.NAN: "the model's logits hold NaN or +inf; no token can be chosen",
    RowStatus.EMPTY: "every token is masked; no token can be chosen",
}


def row_failures(
    step: ScheduledStep, answers: Sequence[Answer], sampled: Sequence[SampledRow]
) -> dict[int, RowFailure]:
    """Return what failed, by row; the sampled token of an unfinished prompt chunk is thrown away and cannot fail."""
    return {
        number: failure
        for number, (answer, row) in enumerate(zip(answers, sampled, strict=True))
        if not step.is_partial_R[number] and (failure := _failure(answer, row)) is not None
    }


def _failure(answer: Answer, row: SampledRow) -> RowFailure | None:
    if answer.form_failure:
        return RowFailure(Status.FINISHED_GRAMMAR_FAILED, answer.form_failure)
    if row.status is RowStatus.OK:
        return None
    if row.status is RowStatus.EMPTY and answer.progress is not None:
        if answer.progress.is_complete:  # only the end token could follow, and it is banned
            return RowFailure(Status.FINISHED_STOPPED, "")
        text = "no token both continues the form and is allowed by the request's other settings"
        return RowFailure(Status.FINISHED_GRAMMAR_FAILED, text)
    return RowFailure(Status.FINISHED_INVALID, _INVALID[row.status])
