"""The last record of a request that nobody will finish, because the ranks that served it are of no use any more."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.engine.admission import Submission
from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.sampling.limits import SamplingLimits


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
