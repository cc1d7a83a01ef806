"""A rank that raises, or falls silent, at any exchange: the others raise within the deadline, naming group and rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.accelerator import Collectives, LostRanksError
from deepinfer.errors import RankFailedError
from deepinfer.parallel.ranks.recording import NamedGroup
from deepinfer_cpu_ref import Driver as ReferenceDriver

Together = Callable[..., list[Any]]
DEADLINE_S = 2.0
GRACE_S = 8.0  # what a busy machine may add


@pytest.mark.parametrize("how", ["raises", "is silent"])
@pytest.mark.parametrize(
    ("purpose", "stage", "nth"),
    [
        ("host", "all_gather", 1),
        ("expert", "all_gather", 1),
        ("expert", "all_to_all", 1),  # rows to their experts
        ("expert", "all_to_all", 2),  # outputs back to be combined
    ],
)
def test_the_others_raise_in_time_and_name_group_and_rank(
    together: Together, strike: Any, purpose: str, stage: str, nth: int, how: str
) -> None:
    def act(seat: Any) -> Any:
        engine, rank = seat.engine, seat.groups.rank
        engine.add_request("a", [5, 6, 7 + rank], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        engine.step()
        if rank == 1:
            strike(getattr(seat.groups, "host" if purpose == "host" else "experts"), stage, how, nth=nth)
        begun = time.monotonic()
        try:
            engine.step()
        except strike.error as error:
            return error, seat.groups.is_broken
        except LostRanksError as error:
            took_s = time.monotonic() - begun
            strike.end()
            return error, took_s
        return None

    first, fault, third = together(3, act, ReferenceDriver, expert_parallel_size=3, rank_deadline_s=DEADLINE_S)
    assert isinstance(fault[0], strike.error)
    assert fault[1]  # it knows that it can take part in nothing any more
    for error, took_s in (first, third):
        assert isinstance(error, LostRanksError)
        assert error.missing == (1,)
        assert f"{purpose} group of ranks 0, 1, 2" in str(error)
        assert took_s < DEADLINE_S + GRACE_S


def test_a_fault_of_a_driver_ends_the_requests_of_its_rank_only(together: Together) -> None:
    def act(seat: Any) -> Any:
        engine, rank = seat.engine, seat.groups.rank
        engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        records, right, faults = engine.step(), engine.worker.run, []

        def struck(*arguments: Any) -> Any:
            engine.worker.run = right
            raise ZeroDivisionError("the driver failed")

        if rank == 1:
            engine.worker.run = struck
        while seat.groups.votes.any_rank(says_yes=engine.has_unfinished_requests()):
            try:
                records += engine.step()
            except ZeroDivisionError as error:
                faults.append(error)
        answer = records[-1].outputs[0]
        return answer.finish_reason, len(answer.token_ids), len(faults), seat.groups.is_broken

    assert together(2, act) == [("length", 4, 0, False), ("abort", 1, 1, False)]


def test_a_rank_whose_books_are_torn_says_so_and_does_not_begin_anew(together: Together) -> None:
    def act(seat: Any) -> Any:
        engine = seat.engine
        engine._books.is_torn = True
        with pytest.raises(RankFailedError, match=f"rank {seat.groups.rank}"):
            engine.step()
        return True

    assert together(2, act) == [True, True]


def test_a_group_names_itself_in_whatever_its_driver_raises() -> None:
    class Breaks(Collectives):
        rank = 1  # type: ignore[assignment]
        world_size = 2  # type: ignore[assignment]

        def all_gather(self, values: torch.Tensor) -> torch.Tensor:
            raise LostRanksError("inner", (0,), "gathering")

        all_reduce_sum = all_to_all = broadcast = barrier = all_gather  # type: ignore[assignment]

    group = NamedGroup(Breaks(), "expert", [4, 5])
    with pytest.raises(LostRanksError, match="rank 5, expert group of ranks 4, 5") as lost:
        group.all_gather(torch.zeros(1))
    assert lost.value.missing == (4,)
    assert group.is_broken
