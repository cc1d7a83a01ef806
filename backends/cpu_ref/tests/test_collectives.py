"""Groups over Gloo. Ranks are threads here, each with a membership of its own; L3 of the suite uses processes."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepinfer.accelerator import LostRanksError, RankPlace
from deepinfer.errors import OpRefusedError
from deepinfer_cpu_ref import Driver
from deepinfer_cpu_ref.collectives import GlooCollectives


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def run(world, act, *, present=None, deadline_s=20.0):
    """Let every present rank join and act; return their results, or the errors that they raised, by rank."""
    address, present = free_address(), range(world) if present is None else present
    finished = threading.Barrier(len(present))

    def one(rank):
        try:
            group = Driver().join_group(RankPlace(rank, world, address, deadline_s))
            return act(group)
        except (LostRanksError, OpRefusedError) as error:
            return error
        finally:
            finished.wait(30)  # nobody's membership is dropped while others still look at it

    with ThreadPoolExecutor(len(present)) as pool:
        return dict(zip(present, pool.map(one, present), strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_exchange_gives_every_rank_what_the_contract_says(world):
    def act(group):
        mine = torch.arange(6.0).view(2, 3) + 10 * group.rank
        rows = torch.full((group.rank * world, 2), group.rank)
        group.barrier()
        return (
            group.all_reduce_sum(mine),
            group.all_gather(mine.t()),
            group.all_to_all(rows, [group.rank] * world, list(range(world))),
            group.broadcast(mine, world - 1),
            group.all_gather(torch.empty(0, 4)),
        )

    base = torch.arange(6.0).view(2, 3)
    for total, stacked, received, sent, empty in run(world, act).values():
        assert torch.equal(total, sum(base + 10 * rank for rank in range(world)))
        assert torch.equal(stacked, torch.stack([(base + 10 * rank).t() for rank in range(world)]))
        assert torch.equal(received, torch.cat([torch.full((rank, 2), rank) for rank in range(world)]))
        assert torch.equal(sent, base + 10 * (world - 1))
        assert empty.shape == (world, 0, 4)


def test_sums_are_added_in_rank_order_to_the_bit():
    terms = torch.tensor([[2.0**24, 0.1], [1.0, 0.2], [-(2.0**24), 0.3]])
    for total in run(3, lambda group: group.all_reduce_sum(terms[group.rank])).values():
        assert torch.equal(total, terms[0] + terms[1] + terms[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64])
def test_every_dtype_keeps_its_bits(dtype):
    values = torch.arange(12).view(3, 4).to(dtype)
    for gathered in run(2, lambda group: group.all_gather(values)).values():
        assert gathered.dtype == dtype
        assert torch.equal(gathered[1].contiguous().view(torch.uint8), values.view(torch.uint8))


def test_a_rank_that_never_joins_is_named_within_the_deadline():
    started = time.monotonic()
    results = run(3, lambda group: None, present=(0, 2), deadline_s=1.0)
    assert time.monotonic() - started < 2.0
    assert {error.missing for error in results.values()} == {(1,)}
    assert "rank 1 did not join" in str(results[2])


def test_an_absent_rank_0_is_named_by_those_who_look_for_it():
    results = run(2, lambda group: None, present=(1,), deadline_s=1.0)
    assert results[1].missing == (0,)


def test_a_rank_that_stays_away_from_an_exchange_is_named_and_the_group_stays_broken():
    def act(group):
        if group.rank == 1:
            return None
        with pytest.raises(LostRanksError) as first:
            group.all_reduce_sum(torch.ones(4))
        with pytest.raises(LostRanksError) as second:
            group.barrier()
        assert second.value is first.value
        return first.value

    started = time.monotonic()
    results = run(3, act, deadline_s=1.0)
    assert time.monotonic() - started < 2.0
    assert (results[0].missing, results[2].missing) == ((1,), (1,))


def test_ranks_that_call_different_things_are_told_instead_of_hanging():
    def act(group):
        return group.barrier() if group.rank == 1 else group.all_gather(torch.ones(2, 3))

    for error in run(2, act).values():
        assert isinstance(error, OpRefusedError)
        assert "barrier" in str(error)
        assert "all_gather of float32 (2, 3)" in str(error)


def test_counts_that_do_not_fit_together_are_told_to_both_sides():
    def act(group):
        return (
            group.all_to_all(torch.ones(3), [0, 3], [0, 0])
            if group.rank == 0
            else group.all_to_all(torch.ones(0), [0, 0], [2, 0])
        )

    results = run(2, act)
    assert "sends 12 bytes to rank 1" in str(results[0])
    assert "awaits 8" in str(results[1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda group: group.all_to_all(torch.ones(3), [1, 1], [1, 1]), "whose sum is its rows"),
        (lambda group: group.all_to_all(torch.ones(3), [3], [3]), "give 2 counts"),
        (lambda group: group.all_to_all(torch.ones(1), [2, -1], [2, 0]), "0 or more"),
        (lambda group: group.all_to_all(torch.ones(4), [2, 2], [3, 3]), "sends itself 2 rows"),
        (lambda group: group.broadcast(torch.ones(3), 2), "no such rank"),
    ],
)
def test_arguments_that_cannot_be_are_refused_before_anything_is_sent(call, words):
    def act(group):
        with pytest.raises(OpRefusedError, match=words):
            call(group)
        return group.all_gather(torch.tensor([group.rank]))

    for gathered in run(2, act).values():
        assert gathered.flatten().tolist() == [0, 1]


def test_an_address_that_is_taken_is_refused_by_rank_0():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        place = RankPlace(0, 2, f"127.0.0.1:{other.getsockname()[1]}", 1.0)
        with pytest.raises(OpRefusedError, match="free port"):
            GlooCollectives(place)


def test_a_group_of_one_needs_nobody():
    group = Driver().join_group(RankPlace(0, 1, "localhost:1"))
    assert (group.rank, group.world_size) == (0, 1)
