"""What many ranks cost beside computing: votes between processes of this machine, and bytes between ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Final

from deepinfer.bench.environment import describe_environment
from deepinfer.bench.rank_exchanges import RankCounts, RankTask
from deepinfer.bench.report import BenchReport, Tick, counts_below, no_tick, quantile
from deepinfer.errors import ArgumentError, RankFailedError
from deepinfer.parallel.ranks.groups import free_port

_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from deepinfer.bench.rank_exchanges import main; "
    "main(sys.argv[2:])"
)
_WAIT_S: Final = 300.0
"""Ranks may start at very different times where they are more than the processors."""


@dataclass(frozen=True, slots=True)
class RanksSettings:
    """What to run; sizes are those of the released model.

    Attributes:
        ranks: numbers of ranks, a case each.
        votes: timed votes per case.
        rows: tokens of a step on each rank.
        hidden, experts, top_k: sizes of a layer; experts are chosen evenly at random.
        columns, width, tables: rows that a token reads of each n-gram table, values of a row, tables.
        seed: changes which experts and rows are chosen.
    """

    ranks: tuple[int, ...] = (2, 4, 8)
    votes: int = 1000
    rows: int = 64
    hidden: int = 5120
    experts: int = 384
    top_k: int = 6
    columns: int = 24
    width: int = 256
    tables: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be run, all at once."""
        problems = counts_below(2, ranks=self.ranks)
        problems += counts_below(
            1,
            votes=self.votes,
            rows=self.rows,
            hidden=self.hidden,
            experts=self.experts,
            top_k=self.top_k,
            columns=self.columns,
            width=self.width,
            tables=self.tables,
        )
        problems += counts_below(0, seed=self.seed)
        if self.top_k > self.experts:
            problems.append(f"{self.top_k} different experts of {self.experts} cannot be chosen")
        if problems:
            raise ArgumentError("bench ranks", problems)


@dataclass(frozen=True, slots=True)
class RanksResult:
    """One number of ranks; bytes leave a rank for another one, a token's share of all ranks' together.

    Attributes:
        ranks: how many.
        vote_us_p50, vote_us_p99: one vote of all ranks, microseconds, on the slowest rank.
        expert_bytes: of one layer, both ways.
        least_expert_bytes: each row once to every other rank that holds an expert of it, and one float32 row back.
        expert_ratio: the one over the other.
        table_bytes: of the n-gram tables, once a step.
        least_table_bytes: each distinct row of a table once.
        table_ratio: the one over the other.
    """

    ranks: int
    vote_us_p50: float
    vote_us_p99: float
    expert_bytes: float
    least_expert_bytes: float
    expert_ratio: float
    table_bytes: float
    least_table_bytes: float
    table_ratio: float


def run_ranks(settings: RanksSettings, *, tick: Tick = no_tick) -> BenchReport[RanksResult]:
    """Measure every number of ranks; ``tick`` is called once for each.

    Raises:
        RankFailedError: a process of a rank has failed.
    """
    results = []
    for world_size in settings.ranks:
        results.append(_result(settings, _counts(settings, world_size)))
        tick()
    return BenchReport("ranks", settings, describe_environment(), tuple(results))


def _counts(settings: RanksSettings, world_size: int) -> list[RankCounts]:
    port = free_port()
    given = {name: value for name, value in asdict(settings).items() if name != "ranks"}
    processes = []
    found = []
    try:
        for rank in range(world_size):
            task = RankTask(rank=rank, world_size=world_size, port=port, deadline_s=_WAIT_S, **given)
            arguments = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), json.dumps(asdict(task))]
            processes.append(
                subprocess.Popen(  # noqa: S603 - this interpreter, and a program of our own
                    arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        for rank, process in enumerate(processes):
            written, said = process.communicate()
            if process.returncode:
                last_words = (said.strip().splitlines() or ["it said nothing"])[-1]
                raise RankFailedError([rank], f"rank {rank} of bench ranks failed: {last_words}")
            found.append(RankCounts(**json.loads(written)))
    finally:
        for process in processes:
            with process:
                process.kill()
    return found


def _result(settings: RanksSettings, counts: list[RankCounts]) -> RanksResult:
    tokens = settings.rows * len(counts)
    slowest = max((each.vote_s for each in counts), key=lambda vote_s: quantile(vote_s, 0.5))
    expert = sum(each.expert_bytes for each in counts)
    least_expert = sum(each.least_expert_bytes for each in counts)
    table = sum(each.table_bytes for each in counts)
    least_table = sum(each.least_table_bytes for each in counts)
    return RanksResult(
        ranks=len(counts),
        vote_us_p50=quantile(slowest, 0.5) * 1e6,
        vote_us_p99=quantile(slowest, 0.99) * 1e6,
        expert_bytes=expert / tokens,
        least_expert_bytes=least_expert / tokens,
        expert_ratio=expert / least_expert if least_expert else 1.0,
        table_bytes=table / tokens,
        least_table_bytes=least_table / tokens,
        table_ratio=table / least_table if least_table else 1.0,
    )
