"""What the rows of a step ask of the sampler, from committed tokens, and what the answers take of what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from deepinfer.engine.answers import Answer
from deepinfer.engine.row_failures import row_failure
from deepinfer.sampling.verification import RunRequest, VerifiedRun
from deepinfer.scheduling.commit import RowFailure
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.step import ScheduledStep


class AskedRuns(NamedTuple):
    """Requests of a step, and how many drafts they verify together."""

    requests: list[RunRequest]
    drafted_tokens: int


class TakenRuns(NamedTuple):
    """What the answers of a step have taken.

    Attributes:
        emitted: the tokens of each row.
        failures: why a row has no token, by its number.
        accepted_tokens: drafts that were accepted, of what was due when it was asked for, as drafted tokens are.
    """

    emitted: list[list[int]]
    failures: dict[int, RowFailure]
    accepted_tokens: int


def asked_runs(
    step: ScheduledStep,
    answers: Sequence[Answer],
    drafts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    is_due: Sequence[bool],
) -> AskedRuns:
    """Describe the sampling of a step; whatever comes before the step has been committed.

    Args:
        step: the step.
        answers: whose rows they are.
        drafts: what each of them verifies, up to the first placeholder.
        lengths: tokens of each request. A decode step makes the token behind the newest one, and those behind drafts.
        is_due: False for rows that are sampled and contribute nothing: of an unfinished chunk, or of a request that
            has ended meanwhile.
    """
    is_prompt = step.kind == "prefill"
    requests = []
    drafted_tokens = 0
    columns = (step.k_R.tolist(), step.q_R.tolist())
    for answer, known, length, due, k, q in zip(answers, drafts, lengths, is_due, *columns, strict=True):
        rows = 1 if is_prompt else q
        allowed_mW = answer.allowed_tokens(known, rows=rows) if due else None
        # Behind a placeholder nothing is emitted, so any id will do there.
        padded = [*known, *[0] * (rows - 1 - len(known))]
        index = k if is_prompt else length
        requests.append(RunRequest(answer.sampling, index, answer.token_ids, padded, allowed_mW, is_due=due))
        drafted_tokens += len(known) if due else 0
    return AskedRuns(requests, drafted_tokens)


def taken_runs(
    step: ScheduledStep,
    answers: Sequence[Answer],
    requests: Sequence[RunRequest],
    runs: Sequence[VerifiedRun],
    is_due: Sequence[bool],
    max_model_len: int,
) -> TakenRuns:
    """Let each answer take its run, up to the token that ends it.

    Args:
        step: the step.
        answers: whose rows they are.
        requests: what was asked.
        runs: what the step gave; nothing if it was not sampled, because all its requests had ended.
        is_due: False for rows that contribute nothing.
        max_model_len: positions that the model can hold.
    """
    emitted: list[list[int]] = []
    failures: dict[int, RowFailure] = {}
    if not runs:
        return TakenRuns([[] for _ in answers], failures, 0)
    accepted_tokens = sum(run.accepted for run, request in zip(runs, requests, strict=True) if request.is_due)
    for number, (answer, run, due) in enumerate(zip(answers, runs, is_due, strict=True)):
        taken: list[int] = []
        if due and answer.form_failure:
            failures[number] = RowFailure(Status.FINISHED_GRAMMAR_FAILED, answer.form_failure)
        elif due:
            sequence = step.sequences[number]
            most = 1 if len(run.rows) == 1 else sequence.token_limit(max_model_len) - sequence.length
            taken, failed = answer.take_run(run.rows, most)
            if failed is not None:
                failures[number] = row_failure(answer, failed)
        emitted.append(taken)
    return TakenRuns(emitted, failures, accepted_tokens)
