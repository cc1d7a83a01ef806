"""Ids of requests that are alive on some rank, and last records of those that nobody will finish."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer import SamplingParams
from deepinfer.engine.admission import Submission
from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.engine.ranks.living import given_up_record, refuse_duplicates
from deepinfer.errors import DuplicateRequestError
from deepinfer.sampling.limits import SamplingLimits


def living(name: str, n: int) -> Any:
    return SimpleNamespace(submission=Submission(name, None, (5,), SamplingParams(n=n)))


@pytest.mark.parametrize("taken", ["a", "b", "b/0", "b/2", "b/1/0"])
def test_the_id_of_a_living_request_or_sibling_is_not_free(taken: str) -> None:
    known = {"a": living("a", 1), "b": living("b", 3), "b/1/0": living("b/1/0", 10**18)}
    with pytest.raises(DuplicateRequestError, match=repr(taken)):
        refuse_duplicates(["free", taken], known)


def test_other_ids_are_free() -> None:
    free = ["", "/", "a/0", "b/3", "b/01", "b/-1", "b/", "b/x", "b/\u0661", "c/0", "b/0/0", "b/" + "9" * 5000]
    refuse_duplicates(free, {"a": living("a", 1), "b": living("b", 3)})


def test_answers_that_had_ended_keep_their_reason_and_the_others_what_they_had() -> None:
    submission = Submission("a", "text", (5, 6), SamplingParams(n=2))
    ended = CompletionOutput(0, "x", (1,), ({1: -0.5},), "stop", stop_reason=7)
    growing = CompletionOutput(1, "yz", (2, 3), ({2: -1.0}, {3: -2.0}), None)
    latest = RequestOutput("a", "text", (5, 6), None, (ended, growing), finished=False)
    record = given_up_record(submission, latest, "rank 1 died")
    assert record.finished
    assert record.outputs == (
        ended,
        CompletionOutput(1, "yz", (2, 3), ({2: -1.0}, {3: -2.0}), "abort", message="rank 1 died"),
    )


@pytest.mark.parametrize(("n", "count"), [(1, 1), (3, 3), (0, 1), (SamplingLimits().choices + 1, 1), (10**12, 1)])
def test_a_request_without_a_record_has_as_many_empty_answers_as_can_be(n: int, count: int) -> None:
    record = given_up_record(Submission("a", None, (5,), SamplingParams(n=n)), None, "rank 1 died")
    assert record.finished
    assert record.outputs == tuple(
        CompletionOutput(index, "", (), None, "abort", message="rank 1 died") for index in range(count)
    )
