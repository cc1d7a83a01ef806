"""`bench ranks` counts what leaves a rank, by hand where sizes are small, and a rank that fails is named."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from deepinfer.accelerator import SoloCollectives
from deepinfer.bench import ranks
from deepinfer.bench.rank_exchanges import CountingGroup, RankCounts, RankTask, carry_out
from deepinfer.bench.ranks import RanksSettings, run_ranks
from deepinfer.errors import ArgumentError, RankFailedError
from deepinfer.parallel.ranks.groups import free_port


def test_bytes_are_those_counted_by_hand() -> None:
    port, finished = free_port(), threading.Barrier(2)

    def one(rank: int) -> RankCounts:
        sizes = {"hidden": 8, "experts": 2, "top_k": 2, "columns": 3, "width": 64, "tables": 2, "seed": 1}
        try:
            return carry_out(RankTask(rank, 2, port, deadline_s=20, votes=2, rows=5, **sizes))
        finally:
            finished.wait(30)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(2)))
    for each in found:
        assert len(each.vote_s) == 2
        # Every row goes to the other rank, with two slots and two weights, and one float32 row comes back.
        assert each.least_expert_bytes == 5 * (8 * 2 + 8 * 4)
        assert each.expert_bytes == 2 * 8 + 5 * (8 * 2 + 2 * 8 + 2 * 4) + 5 * 8 * 4
    # A row is 64 values and two scales; asking for it takes two numbers, and every rank says two counts.
    rows = sum(each.least_table_bytes for each in found) // (64 + 2)
    assert 0 < rows < 2 * 2 * 5 * 3
    assert sum(each.table_bytes for each in found) == rows * (64 + 2 + 2 * 8) + 2 * 2 * 8


def test_what_stays_on_a_rank_does_not_count() -> None:
    group = CountingGroup(SoloCollectives())
    rows = torch.zeros(3, 4)
    group.all_to_all(rows, [3], [3])
    group.all_gather(rows)
    group.all_reduce_sum(rows)
    group.broadcast(rows, 0)
    group.barrier()
    assert group.sent_bytes == 0


def test_a_rank_that_fails_is_named_and_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PROGRAM", "import sys; sys.exit('no room')")
    with pytest.raises(RankFailedError, match="rank 0 of bench ranks failed: no room"):
        run_ranks(RanksSettings(ranks=(2,), votes=1, rows=1))


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ArgumentError, match="6 different experts of 4"):
        RanksSettings(experts=4)
