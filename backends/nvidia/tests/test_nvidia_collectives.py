"""What of the exchanges is NCCL's own; the rest is tested once, in tests/accelerator/test_process_group.py."""

from __future__ import annotations

import datetime
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from deepinfer.accelerator.collectives import LostRanksError, RankPlace, SoloCollectives
from deepinfer.errors import OpRefusedError
from deepinfer_nvidia import Driver
from deepinfer_nvidia.collectives import NcclCollectives


def gloo(store, place):
    return ProcessGroupGloo(store, place.rank, place.world_size, datetime.timedelta(seconds=place.deadline_s))


def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_group_goes_by_the_name_of_its_library():
    group = NcclCollectives(RankPlace(0, 1, address(), 20.0), gloo)
    with pytest.raises(OpRefusedError, match="in a NCCL group of 1 ranks"):
        group.broadcast(torch.ones(1), 3)


def test_what_a_lost_exchange_left_on_the_device_is_aborted():
    aborted = []

    class Stuck:
        def is_completed(self):
            return False

    class Transport:
        def barrier(self):
            return Stuck()

        def abort(self):
            aborted.append(True)

    def one(rank):
        group = NcclCollectives(RankPlace(rank, 2, where, 1.0), lambda store, place: Transport())
        with pytest.raises(LostRanksError):
            group.barrier()
        return group

    where = address()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(one, range(2)))
    assert len(groups) == len(aborted) == 2


def test_one_rank_needs_no_runtime():
    for driver in (Driver(interpreted=False), Driver(interpreted=True)):
        assert isinstance(driver.join_group(RankPlace(0, 1, "127.0.0.1:1")), SoloCollectives)
    with pytest.raises(OpRefusedError, match="groups of one"):
        Driver(interpreted=True).join_group(RankPlace(0, 2, "127.0.0.1:1"))
