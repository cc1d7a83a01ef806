"""Rows of a step without a token, and how each of their requests ends."""

from __future__ import annotations

from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer.engine.answers import Answer
from deepinfer.sampling.sampler import SampledRow
from deepinfer.scheduling.commit import RowFailure
from deepinfer.scheduling.states import Status

_INVALID = {
    RowStatus.NAN: "the model's logits hold NaN or +inf; no token can be chosen",
    RowStatus.EMPTY: "every token is masked; no token can be chosen",
}


def row_failure(answer: Answer, row: SampledRow) -> RowFailure:
    """Return how an answer ends that has come to a row without a token."""
    if row.status is RowStatus.EMPTY and answer.progress is not None:
        if answer.progress.is_complete:  # only the end token could follow, and it is banned
            return RowFailure(Status.FINISHED_STOPPED, "")
        text = "no token both continues the form and is allowed by the request's other settings"
        return RowFailure(Status.FINISHED_GRAMMAR_FAILED, text)
    return RowFailure(Status.FINISHED_INVALID, _INVALID[row.status])
