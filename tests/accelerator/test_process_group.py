"""Exchanges keep bits, order and counts, and end when a rank is missing; Gloo carries them, threads are the ranks."""

from __future__ import annotations

import datetime
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from deepinfer.accelerator.collectives import LostRanksError, RankPlace
from deepinfer.accelerator.process_group import ProcessGroupCollectives
from deepinfer.errors import OpRefusedError
from deepinfer_conformance.ranks import exchanges

RANKS = 3
HOST = torch.device("cpu")


def gloo(store, place):
    return ProcessGroupGloo(store, place.rank, place.world_size, datetime.timedelta(seconds=place.deadline_s))


def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def on_ranks(act, *, absent=(), deadline_s=20.0):
    """Run ``act`` on every rank but the absent ones; return what each returned or raised."""
    where = address()
    ranks = [rank for rank in range(RANKS) if rank not in absent]
    done = threading.Barrier(len(ranks))

    def one(rank):
        try:
            group = ProcessGroupCollectives(RankPlace(rank, RANKS, where, deadline_s), "test", gloo)
            found = act(group)
        except LostRanksError as error:
            found, group = error, None
        # A group that is dropped closes its connections: all live until all have answered.
        done.wait(30)
        return found, group

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [found for found, _ in pool.map(one, ranks)]


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "all_to_all", "broadcast", "dtypes"])
def test_every_exchange_passes_the_suites_own_check(name):
    assert on_ranks(lambda group: getattr(exchanges, name)(group, HOST)) == [[], [], []]


def test_a_rank_that_never_joins_is_named_within_the_deadline():
    began = time.monotonic()
    found = on_ranks(lambda group: None, absent=(1,), deadline_s=1.0)
    assert time.monotonic() - began < 5
    assert [error.missing for error in found] == [(1,), (1,)]


def test_a_rank_that_never_calls_is_named_and_the_group_stays_broken():
    def act(group):
        if group.rank == 1:
            return None
        with pytest.raises(LostRanksError) as first:
            group.barrier()
        with pytest.raises(LostRanksError) as second:
            group.all_gather(torch.ones(2))
        return first.value.missing, second.value is first.value

    assert on_ranks(act, deadline_s=1.5) == [((1,), True), None, ((1,), True)]


def test_counts_that_do_not_fit_are_refused_before_anything_is_sent():
    def act(group):
        with pytest.raises(OpRefusedError, match="send counts whose sum is its rows"):
            group.all_to_all(torch.ones(3, 2), [1, 1, 2], [1, 1, 1])
        with pytest.raises(OpRefusedError, match="no such rank"):
            group.broadcast(torch.ones(1), 3)

    assert on_ranks(act) == [None, None, None]
