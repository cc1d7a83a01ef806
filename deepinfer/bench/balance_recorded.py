"""Balancing policies side by side on loads that were recorded, window after window."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from deepinfer.bench.balance import EXPERT_BYTES, BalanceResult, Planned, Ratios, measured_plan, over_greedy
from deepinfer.bench.environment import describe_environment
from deepinfer.bench.report import BenchReport, Clock, Tick, counts_below, no_tick
from deepinfer.errors import ArgumentError
from deepinfer.parallel.load_file import read_loads
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import PlacementShape
from deepinfer.parallel.policies import POLICY_NAMES
from deepinfer.parallel.shares import busiest_over_mean

RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class RecordedSettings:
    """What to run.

    Attributes:
        file: recorded loads, as ``deepinfer eval --save-loads`` and ``deepinfer balance plan`` know them.
        ranks, slots_per_rank: sizes of the placement.
        steps: steps of a window.
        expert_bytes: what one slot weighs.
    """

    file: Path
    ranks: int = 4
    slots_per_rank: int = 3
    steps: int = 10
    expert_bytes: int = EXPERT_BYTES

    def __post_init__(self) -> None:
        """Refuse what cannot be run, all at once."""
        problems = counts_below(
            1, ranks=self.ranks, slots_per_rank=self.slots_per_rank, steps=self.steps, expert_bytes=self.expert_bytes
        )
        if problems:
            raise ArgumentError("bench balance", problems)


def run_recorded(
    settings: RecordedSettings, *, clock: Clock = time.process_time, tick: Tick = no_tick
) -> BenchReport[BalanceResult]:
    """Let every policy go through the windows in order: plan from each one, judged on the next.

    All begin with the start-up layout; each keeps what it made of the windows before.

    Raises:
        ArgumentError: fewer than two windows were recorded, or the slots cannot hold the experts.
    """
    windows = _windows(settings)
    walks = {}
    for name in POLICY_NAMES:
        walks[name] = _walk(settings, name, windows, clock)
        tick()
    results = tuple(_result(name, *walks[name], walks["greedy"][1]) for name in POLICY_NAMES)
    return BenchReport("balance", settings, describe_environment(), results)


def _windows(settings: RecordedSettings) -> list[LoadWindow]:
    recorded = read_loads(settings.file)
    steps, _, experts = recorded.counts_TLE.shape
    problems = []
    if steps < 2 * settings.steps:
        problems.append(f"{settings.file}: {steps} steps make fewer than two windows of {settings.steps}")
    if settings.ranks * settings.slots_per_rank < experts:
        problems.append(f"{settings.ranks} ranks x {settings.slots_per_rank} slots cannot hold {experts} experts")
    if problems:
        raise ArgumentError("bench balance", problems)
    starts = range(0, steps - settings.steps + 1, settings.steps)
    return [LoadWindow(recorded.counts_TLE[start : start + settings.steps]) for start in starts]


def _walk(
    settings: RecordedSettings, name: str, windows: list[LoadWindow], clock: Clock
) -> tuple[list[Planned], Ratios]:
    """Return a policy's plans, and busiest over mean of each on the window after it."""
    _, layers, experts = windows[0].counts_TLE.shape
    redundant = settings.ranks * settings.slots_per_rank - experts
    layout_LS = PlacementShape(layers, experts, settings.ranks, redundant).start_up_layout()
    plans, judged = [], []
    for window, after in itertools.pairwise(windows):
        plans.append(measured_plan(settings, name, window, layout_LS, clock))
        layout_LS = plans[-1].layout_LS
        judged.append(float(busiest_over_mean(after, layout_LS, settings.ranks).mean()))
    return plans, np.array(judged)


def _result(name: str, plans: list[Planned], judged: Ratios, greedy_judged: Ratios) -> BalanceResult:
    difference, error = over_greedy(judged, greedy_judged)
    return BalanceResult(
        load=RECORDED,
        drift=None,
        policy=name,
        planning_ratio=round(mean(each.planning_ratio for each in plans), 6),
        next_ratio=round(float(judged.mean()), 6),
        moved_slots=round(mean(each.moved_slots for each in plans), 3),
        bytes=sum(each.bytes for each in plans) // len(plans),
        seconds=round(mean(each.seconds for each in plans), 4),
        over_greedy=difference,
        over_greedy_error=error,
    )
