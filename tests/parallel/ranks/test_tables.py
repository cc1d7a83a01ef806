"""Rows of n-gram tables that ranks hold together are those of the whole tables, and each is asked for once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.accelerator import Collectives
from deepinfer.accelerator.ops.memory import NgramTable
from deepinfer.parallel.ranks.recording import NamedGroup, Recorder
from deepinfer.parallel.ranks.tables import SpreadTables, share_rows

InThreads = Callable[[int, Callable[[Collectives], Any]], list[Any]]
ROWS = (50, 7, 2)


def tables_of(*, is_coded: bool, row_counts: Sequence[int] = ROWS) -> list[NgramTable]:
    draws = torch.Generator().manual_seed(3)
    made = []
    for number, rows in enumerate(row_counts):
        if not is_coded:
            made.append(NgramTable(f"t{number}", torch.randn(rows, 6, generator=draws), None))
            continue
        codes = torch.randint(0, 120, (rows, 64), generator=draws, dtype=torch.uint8)
        scales = torch.randint(100, 140, (rows, 2), generator=draws, dtype=torch.uint8)
        made.append(NgramTable(f"t{number}", codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)))
    return made


def wanted_of(rank: int, row_counts: Sequence[int] = ROWS) -> list[torch.Tensor]:
    """Rank 0 reads nothing, rank 1 only rows that are dead, the others more and more rows, some of them twice."""
    draws = torch.Generator().manual_seed(rank)
    shape = (5 * rank, 4)
    low = [-rows if rank == 1 else -2 for rows in row_counts]
    high = [0 if rank == 1 else rows for rows in row_counts]
    drawn = [torch.randint(lowest, most, shape, generator=draws) for lowest, most in zip(low, high, strict=True)]
    return [rows_TF.clamp(min=-1) for rows_TF in drawn]


def looked_up(table: NgramTable, rows_TF: torch.Tensor) -> list[torch.Tensor]:
    """Bytes of the rows that are read; a row that is none is zeros."""
    known = rows_TF.clamp(min=0)
    parts = [part.view(torch.uint8) for part in (table.rows_RW, table.scales) if part is not None]
    return [torch.where((rows_TF < 0)[..., None], 0, part[known]) for part in parts]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("is_coded", [True, False])
def test_fetched_rows_are_those_of_the_whole_table(in_threads: InThreads, world: int, *, is_coded: bool) -> None:
    tables = tables_of(is_coded=is_coded)

    def act(group: Collectives) -> Any:
        recorder = Recorder()
        spread = SpreadTables(NamedGroup(group, "table", range(world), recorder))
        shares = [spread.share(table) for table in tables]
        # What another rank holds is not there to be read by mistake.
        assert all(len(share.rows_RW) <= share_rows(rows, world) for share, rows in zip(shares, ROWS, strict=True))
        wanted = wanted_of(group.rank)
        fetched = spread.fetch(shares, ROWS, wanted)
        for table, rows_TF, (small, number_TF) in zip(tables, wanted, fetched, strict=True):
            assert torch.equal(number_TF < 0, rows_TF < 0)
            assert small.rows_RW.dtype == table.rows_RW.dtype
            found, expected = looked_up(small, number_TF), looked_up(table, rows_TF)
            assert len(found) == len(expected) == 1 + is_coded
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)
        return recorder.calls

    calls = in_threads(world, act)
    assert [call.op for call in calls[0]] == ["all_gather", "all_to_all", "all_to_all"]
    assert calls == [calls[0]] * world


def test_a_row_is_asked_for_once_however_often_it_is_read(in_threads: InThreads) -> None:
    tables = tables_of(is_coded=True, row_counts=(10,))
    travelled: list[int] = []

    def act(group: Collectives) -> Any:
        spread, right = SpreadTables(group), group.all_to_all

        def counted(rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
            if rows.dtype == torch.uint8:
                travelled.append(len(rows))
            return right(rows, send, receive)

        group.all_to_all = counted  # type: ignore[method-assign]
        shares = [spread.share(table) for table in tables]
        rows_TF = torch.tensor([[9, 9, 3], [3, 9, -1]] * 100)
        ((small, _),) = spread.fetch(shares, (10,), [rows_TF])
        return len(small.rows_RW)

    assert in_threads(2, act) == [2, 2]
    assert sum(travelled) == 4  # two rows for each of two ranks


@given(rows=st.integers(1, 1000), ranks=st.integers(1, 70))
def test_shares_hold_every_row_once(rows: int, ranks: int) -> None:
    size = share_rows(rows, ranks)
    held = [len(range(rows)[rank * size : (rank + 1) * size]) for rank in range(ranks)]
    assert sum(held) == rows
    assert max(held) == size
    assert held == sorted(held, reverse=True)
