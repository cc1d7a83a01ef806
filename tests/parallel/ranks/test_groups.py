"""What ranks agree on, how groups are formed and named, and what is recorded. Ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from deepinfer.accelerator import LostRanksError, SoloCollectives
from deepinfer.errors import ArgumentError
from deepinfer.parallel.ranks.groups import RankGroups, free_port, join_groups
from deepinfer.parallel.ranks.messages import all_gather_bytes
from deepinfer.parallel.ranks.recording import NamedGroup, RecordedCall, Recorder
from deepinfer.parallel.ranks.votes import HostVotes
from deepinfer.settings import LaunchedRank
from deepinfer_cpu_ref import Driver


def together(
    world: int,
    act: Callable[[RankGroups], Any],
    *,
    size: int = 1,
    deadline_s: float = 20.0,
    place: Callable[[LaunchedRank], LaunchedRank] = lambda place: place,
) -> list[Any]:
    port, finished = free_port(), threading.Barrier(world)

    def one(rank: int) -> Any:
        try:
            seat = place(LaunchedRank(rank, world, rank, world, "127.0.0.1", port))
            groups = join_groups(seat, Driver(), expert_parallel_size=size, deadline_s=deadline_s)
            return act(groups)
        except LostRanksError as error:
            return error
        finally:
            finished.wait(30)

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


@pytest.mark.parametrize("world", [2, 3])
def test_votes_and_numbers_are_agreed(world: int) -> None:
    def act(groups: RankGroups) -> Any:
        votes, rank = groups.votes, groups.rank
        first = rank == 0
        return (
            votes.any_rank(says_yes=first),
            votes.any_rank(says_yes=False),
            votes.every_rank(says_yes=first),
            votes.every_rank(says_yes=True),
            votes.least(10 - rank, rank),
            votes.most(10 - rank, rank),
            votes.cast,
        )

    found = together(world, act)
    assert found == [(True, False, False, True, (11 - world, 0), (10, world - 1), 6)] * world


def test_messages_of_any_length_reach_every_rank() -> None:
    messages = [b"", b"a\0b\0", b"c" * 5000]
    found = together(3, lambda groups: all_gather_bytes(groups.host, messages[groups.rank]))
    assert found == [messages] * 3
    assert together(2, lambda groups: all_gather_bytes(groups.host, b"")) == [[b"", b""]] * 2


def test_expert_groups_are_of_consecutive_ranks() -> None:
    def act(groups: RankGroups) -> Any:
        assert groups.experts is not None
        gathered = groups.experts.all_gather(torch.tensor([groups.rank])).flatten().tolist()
        return groups.experts.name, groups.experts.rank, gathered

    assert together(4, act, size=2) == [
        ("expert group of ranks 0, 1", 0, [0, 1]),
        ("expert group of ranks 0, 1", 1, [0, 1]),
        ("expert group of ranks 2, 3", 0, [2, 3]),
        ("expert group of ranks 2, 3", 1, [2, 3]),
    ]


def test_a_missing_rank_is_named_by_its_number_in_the_world() -> None:
    def act(groups: RankGroups) -> Any:
        if groups.rank != 3:
            assert groups.experts is not None
            groups.experts.barrier()
        return groups.is_broken

    *_, silent_peer, silent = together(4, act, size=2, deadline_s=1.5)
    assert silent is False
    assert isinstance(silent_peer, LostRanksError)
    assert silent_peer.missing == (3,)
    assert "rank 2, expert group of ranks 2, 3" in str(silent_peer)


def test_ranks_meet_through_a_launchers_store() -> None:
    held = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)

    def through_store(place: LaunchedRank) -> LaunchedRank:
        return LaunchedRank(place.rank, 2, place.rank, 2, "127.0.0.1", held.port, has_store=True, attempt="4")

    found = together(2, lambda groups: groups.votes.any_rank(says_yes=groups.rank == 1), place=through_store)
    assert found == [True, True]


def test_a_store_that_is_not_there_is_a_missing_rank() -> None:
    place = LaunchedRank(1, 2, 1, 2, "127.0.0.1", free_port(), has_store=True)
    with pytest.raises(LostRanksError, match="rank 1 finds no address in the launcher's store"):
        join_groups(place, Driver(), expert_parallel_size=1, deadline_s=0.5)


def test_a_size_that_does_not_divide_is_refused() -> None:
    place = LaunchedRank(0, 4, 0, 4, "127.0.0.1", free_port())
    with pytest.raises(ArgumentError, match="expert_parallel_size=3 does not divide the 4 ranks"):
        join_groups(place, Driver(), expert_parallel_size=3, deadline_s=0.5)


def test_every_exchange_is_recorded_as_all_ranks_must_make_it() -> None:
    recorder = Recorder()
    group = NamedGroup(SoloCollectives(), "host", [0], recorder)
    rows = torch.zeros(5, 3, dtype=torch.bfloat16)
    group.all_reduce_sum(rows)
    group.all_gather(rows)
    group.all_to_all(rows, [5], [5])
    group.broadcast(rows, 0)
    group.barrier()
    name = "host group of ranks 0"
    assert recorder.calls == [
        RecordedCall(name, "all_reduce_sum", (5, 3), "bfloat16"),
        RecordedCall(name, "all_gather", (5, 3), "bfloat16"),
        RecordedCall(name, "all_to_all", (3,), "bfloat16"),  # as many rows as a rank has
        RecordedCall(name, "broadcast from 0", (5, 3), "bfloat16"),
        RecordedCall(name, "barrier", (), "uint8"),
    ]


def test_a_vote_of_one_rank_is_its_own() -> None:
    votes = HostVotes(SoloCollectives())
    assert (votes.any_rank(says_yes=True), votes.every_rank(says_yes=False), votes.least(3, -1)) == (
        True,
        False,
        (3, -1),
    )
