"""What of the exchanges is HCCL's own; the rest is tested once, in tests/accelerator/test_process_group.py."""

from __future__ import annotations

import datetime
import socket

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from deepinfer.accelerator.collectives import RankPlace, SoloCollectives
from deepinfer.errors import OpRefusedError
from deepinfer_ascend import Driver
from deepinfer_ascend.collectives import HcclCollectives


def gloo(store, place):
    return ProcessGroupGloo(store, place.rank, place.world_size, datetime.timedelta(seconds=place.deadline_s))


def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_group_goes_by_the_name_of_its_library():
    group = HcclCollectives(RankPlace(0, 1, address(), 20.0), gloo)
    with pytest.raises(OpRefusedError, match="in a HCCL group of 1 ranks"):
        group.broadcast(torch.ones(1), 3)


def test_one_rank_needs_no_runtime():
    assert isinstance(Driver().join_group(RankPlace(0, 1, "127.0.0.1:1")), SoloCollectives)
    assert isinstance(Driver().collectives(1), SoloCollectives)
