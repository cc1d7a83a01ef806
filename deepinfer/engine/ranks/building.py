"""One rank's engine: the groups are joined first, so that a rank that does not come is missed before anything loads."""

from __future__ import annotations

from os import PathLike

from deepinfer.accelerator.selection import select
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import ArgumentError
from deepinfer.parallel.ranks.groups import RankGroups, join_groups
from deepinfer.parallel.ranks.recording import Recorder
from deepinfer.settings import LaunchedRank, Settings


def build_rank(
    place: LaunchedRank,
    model: str | PathLike[str] | None,
    accelerator: str | None,
    options: EngineOptions,
    settings: Settings,
    recorder: Recorder | None = None,
) -> tuple[Engine, RankGroups]:
    """Join the groups of a rank, build its engine, and return when every rank has.

    Raises:
        ArgumentError: the options ask for another number of ranks than the launcher has started.
        LostRanksError: other ranks did not come.
    """
    asked = options.data_parallel_size
    if asked is not None and asked != place.world_size:
        raise ArgumentError(
            "engine options",
            [
                f"data_parallel_size={asked}, and the launcher has started {place.world_size} processes; leave the "
                f"option out, or start as many"
            ],
        )
    driver = select(accelerator, settings).driver()
    groups = join_groups(
        place,
        driver,
        expert_parallel_size=options.expert_parallel_size,
        deadline_s=options.rank_deadline_s,
        context_parallel_size=options.context_parallel_size,
        spreads_tables=options.spread_ngram_tables,
        recorder=recorder,
    )
    engine = build_engine_on(driver, model, options, settings, ranks=groups)
    groups.host.barrier()
    return engine, groups
