"""Balancing policies side by side on loads that were recorded, window after window."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deepinfer.bench.balance import EXPERT_BYTES, BalanceResult
from deepinfer.bench.environment import describe_environment
from deepinfer.bench.report import BenchReport, Clock, Tick, counts_below, no_tick
from deepinfer.errors import ArgumentError
from deepinfer.parallel.exchange import ExpertPart, plan_exchange
from deepinfer.parallel.load_file import read_loads
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import PlacementShape
from deepinfer.parallel.policies import POLICY_NAMES, make_policy
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
    ratios = {}
    results = []
    for name in POLICY_NAMES:
        result, ratios[name] = _walk(settings, name, windows, clock)
        results.append(result)
        tick()
    compared = tuple(_beside(result, ratios[result.policy] - ratios["greedy"]) for result in results)
    return BenchReport("balance", settings, describe_environment(), compared)


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
) -> tuple[BalanceResult, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    policy = make_policy(name)
    _, layers, experts = windows[0].counts_TLE.shape
    redundant = settings.ranks * settings.slots_per_rank - experts
    layout_LS = PlacementShape(layers, experts, settings.ranks, redundant).start_up_layout()
    planning, judged, moved, nbytes, seconds = [], [], 0, 0, 0.0
    for window, after in itertools.pairwise(windows):
        begun = clock()
        planned_LS = policy.plan(window, layout_LS, settings.ranks)
        seconds += clock() - begun
        exchange = plan_exchange(layout_LS, planned_LS, settings.ranks, (ExpertPart("expert", settings.expert_bytes),))
        moved, nbytes, layout_LS = moved + len(exchange.moves), nbytes + exchange.nbytes, planned_LS
        planning.append(float(busiest_over_mean(window, layout_LS, settings.ranks).mean()))
        judged.append(float(busiest_over_mean(after, layout_LS, settings.ranks).mean()))
    plans = len(judged)
    result = BalanceResult(
        load=RECORDED,
        drift=None,
        policy=name,
        planning_ratio=round(float(np.mean(planning)), 6),
        next_ratio=round(float(np.mean(judged)), 6),
        moved_slots=round(moved / layers / plans, 3),
        bytes=nbytes // plans,
        seconds=round(seconds / plans, 4),
        over_greedy=0.0,
        over_greedy_error=0.0,
    )
    return result, np.array(judged)


def _beside(result: BalanceResult, differences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> BalanceResult:
    error = differences.std(ddof=1) / np.sqrt(differences.size) if differences.size > 1 else 0.0
    return replace(result, over_greedy=round(float(differences.mean()), 6), over_greedy_error=round(float(error), 6))
