"""One rank of ``bench ranks``, in a process of its own: it votes, and counts the bytes that it sends to others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from deepinfer.accelerator import Collectives, registry
from deepinfer.accelerator.ops.experts import Routing
from deepinfer.accelerator.ops.memory import NgramTable
from deepinfer.accelerator.plan import REFERENCE
from deepinfer.parallel.placement import PlacementShape
from deepinfer.parallel.ranks.experts import SpreadExperts
from deepinfer.parallel.ranks.groups import RankGroups, join_groups
from deepinfer.parallel.ranks.tables import SpreadTables, share_rows
from deepinfer.parallel.replicas import choose_slots
from deepinfer.settings import LaunchedRank

WARM_UP_VOTES = 20
_TABLE_ROWS = 65_536
_SCALE_GROUP = 32
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class RankTask:
    """What one rank does.

    Attributes:
        rank, world_size, port: where it stands.
        deadline_s: how long ranks wait for each other.
        votes: timed votes.
        rows: tokens of a step on this rank.
        hidden, experts, top_k: sizes of the layer that is exchanged for; activations are bfloat16.
        columns, width, tables: n-gram table rows that a token reads of each table, values of a row, tables.
        seed: changes which experts and rows are chosen.
    """

    rank: int
    world_size: int
    port: int
    deadline_s: float
    votes: int
    rows: int
    hidden: int
    experts: int
    top_k: int
    columns: int
    width: int
    tables: int
    seed: int


@dataclass(frozen=True, slots=True)
class RankCounts:
    """What it found: seconds of each vote, and bytes to other ranks, sent and the least that would do."""

    vote_s: list[float]
    expert_bytes: int
    least_expert_bytes: int
    table_bytes: int
    least_table_bytes: int


class CountingGroup(Collectives):
    """A group that adds up what it sends to ranks other than its own."""

    def __init__(self, inner: Collectives) -> None:
        """Count nothing yet."""
        self._inner = inner
        self.sent_bytes = 0

    @property
    def rank(self) -> int:
        """Of the group."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Of the group."""
        return self._inner.world_size

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Count one copy for each other rank."""
        self._count(values, self.world_size - 1)
        return self._inner.all_reduce_sum(values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Count one copy for each other rank."""
        self._count(values, self.world_size - 1)
        return self._inner.all_gather(values)

    def all_to_all(self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> torch.Tensor:
        """Count the rows for others."""
        if len(rows):
            self._count(rows[0], len(rows) - send_counts[self.rank])
        return self._inner.all_to_all(rows, send_counts, receive_counts)

    def broadcast(self, values: torch.Tensor, source: int) -> torch.Tensor:
        """Count one copy for each other rank, if they are this one's."""
        self._count(values, self.world_size - 1 if source == self.rank else 0)
        return self._inner.broadcast(values, source)

    def barrier(self) -> None:
        """Count nothing."""
        self._inner.barrier()

    def _count(self, values: torch.Tensor, copies: int) -> None:
        self.sent_bytes += values.numel() * values.element_size() * copies


def main(arguments: Sequence[str]) -> None:
    """Do the task that stands in the only argument as JSON, and write what was found as JSON."""
    torch.set_num_threads(1)
    found = carry_out(RankTask(**cast("Mapping[str, Any]", json.loads(arguments[0]))))
    sys.stdout.write(json.dumps(asdict(found)))


def carry_out(task: RankTask) -> RankCounts:
    """Join the others, vote, and exchange one layer and one step's table rows."""
    groups = join_groups(
        LaunchedRank(task.rank, task.world_size, task.rank, task.world_size, "127.0.0.1", task.port),
        registry.load(REFERENCE)(),
        expert_parallel_size=task.world_size,
        deadline_s=task.deadline_s,
        spreads_tables=True,
    )
    vote_s = []
    for _ in range(WARM_UP_VOTES + task.votes):
        begun = time.perf_counter()
        groups.votes.any_rank(says_yes=False)
        vote_s.append(time.perf_counter() - begun)
    draws = np.random.Generator(np.random.PCG64([task.seed, task.rank]))
    sent, least = _experts(task, groups, draws)
    fetched, least_fetched = _tables(task, groups, draws)
    groups.host.barrier()
    return RankCounts(vote_s[WARM_UP_VOTES:], sent, least, fetched, least_fetched)


def _experts(task: RankTask, groups: RankGroups, draws: np.random.Generator) -> tuple[int, int]:
    """Exchange the rows of one layer; the least is each row once to every rank concerned, and one float32 row back."""
    group = CountingGroup(cast("Collectives", groups.experts))
    spread = SpreadExperts(group, PlacementShape(1, task.experts, task.world_size), _CPU)
    x_TD = torch.zeros(task.rows, task.hidden, dtype=torch.bfloat16)
    chosen = np.stack([draws.permutation(task.experts)[: task.top_k] for _ in range(task.rows)])
    experts_Tk = torch.from_numpy(chosen.astype(np.int64))
    key_T = spread.row_keys(torch.arange(task.rows), torch.arange(task.rows))

    def idle(x_nD: torch.Tensor, routing: Routing, _: object) -> torch.Tensor:
        return torch.zeros(*routing.experts_Tk.shape, x_nD.shape[1])

    silent: Any = SimpleNamespace(experts=SimpleNamespace(routed=idle))
    nothing: Any = None
    spread.routed(0, x_TD, Routing(experts_Tk, torch.zeros(task.rows, task.top_k)), key_T, nothing, silent)
    copies_E = torch.from_numpy(spread.maps.copies_LE[0])
    slots_EC = torch.from_numpy(spread.maps.slots_LEC[0].astype(np.int64))
    slots_Tk = choose_slots(experts_Tk, key_T, copies_E, slots_EC)
    at_Tk = torch.div(slots_Tk, spread.shape.slots_per_rank, rounding_mode="floor")
    others = [rank for rank in range(task.world_size) if rank != task.rank]
    journeys = sum(int((at_Tk == rank).any(dim=1).sum()) for rank in others)
    # What this rank's rows cause: they go out from here, and as much comes back to here from others.
    back = journeys * task.hidden * torch.float32.itemsize
    return group.sent_bytes, journeys * task.hidden * x_TD.element_size() + back


def _tables(task: RankTask, groups: RankGroups, draws: np.random.Generator) -> tuple[int, int]:
    """Fetch the rows of one step; the least is each distinct row once, and no word about which."""
    group = CountingGroup(cast("Collectives", groups.tables))
    spread = SpreadTables(group)
    values = torch.zeros(_TABLE_ROWS, task.width, dtype=torch.uint8)
    scales = torch.zeros(_TABLE_ROWS, task.width // _SCALE_GROUP, dtype=torch.uint8)
    shares = [spread.share(NgramTable(str(number), values, scales)) for number in range(task.tables)]
    wanted = [draws.integers(0, _TABLE_ROWS, (task.rows, task.columns)) for _ in shares]
    spread.fetch(shares, [_TABLE_ROWS] * task.tables, [torch.from_numpy(rows_TF) for rows_TF in wanted])
    size = share_rows(_TABLE_ROWS, task.world_size)
    distinct = [np.unique(rows_TF) for rows_TF in wanted]
    away = sum(int((row_n // size != task.rank).sum()) for row_n in distinct)
    return group.sent_bytes, away * (task.width + task.width // _SCALE_GROUP)
