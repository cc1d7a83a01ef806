"""Balancing policies side by side, each judged on the window after the one that it planned from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from deepinfer.bench.balance_loads import DEFAULT_LOADS, LoadShape, LoadStream, zipf_exponent
from deepinfer.bench.environment import describe_environment
from deepinfer.bench.report import BenchReport, Clock, Tick, counts_below, no_tick
from deepinfer.errors import ArgumentError
from deepinfer.parallel.exchange import ExpertPart, plan_exchange
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout, PlacementShape
from deepinfer.parallel.policies import POLICY_NAMES, make_policy
from deepinfer.parallel.shares import busiest_over_mean

PLANNINGS = 5
"""How often each plan is made: processors that others use change their speed from moment to moment."""

EXPERT_BYTES = 18_800_640
"""Weights and scales of one expert of V4.1-Flash."""


Ratios = np.ndarray[tuple[int], np.dtype[np.float64]]


class Placement(Protocol):
    """Sizes that a plan needs."""

    @property
    def ranks(self) -> int:
        """Ranks that share the experts."""

    @property
    def expert_bytes(self) -> int:
        """What one slot weighs."""


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """What to run.

    Attributes:
        loads: ``zipf-EXPONENT`` or ``lognormal``.
        drifts: shares of the experts that swap weights after each window.
        seed: changes weights, counts and drift.
        continuations: windows that may follow, each with its own chances; figures of the next window are their means.
        layers, experts, ranks, slots_per_rank: sizes of the placement.
        steps: steps of a window.
        pairs_per_step: pairs of a token and an expert in one step of one layer.
        expert_bytes: what one slot weighs.
    """

    loads: tuple[str, ...] = DEFAULT_LOADS
    drifts: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2)
    seed: int = 0
    continuations: int = 16
    layers: int = 40
    experts: int = 384
    ranks: int = 64
    slots_per_rank: int = 7
    steps: int = 10
    pairs_per_step: int = 98_304
    expert_bytes: int = EXPERT_BYTES

    def __post_init__(self) -> None:
        """Refuse what cannot be run, all at once."""
        problems = counts_below(
            1,
            continuations=self.continuations,
            layers=self.layers,
            experts=self.experts,
            ranks=self.ranks,
            slots_per_rank=self.slots_per_rank,
            steps=self.steps,
            pairs_per_step=self.pairs_per_step,
            expert_bytes=self.expert_bytes,
        )
        problems += counts_below(0, seed=self.seed)
        problems += [f"{name} is empty" for name in ("loads", "drifts") if not getattr(self, name)]
        problems += [f"drift {drift} is no share from 0 to 1" for drift in self.drifts if not 0 <= drift <= 1]
        if self.ranks * self.slots_per_rank < self.experts:
            problems.append(f"{self.ranks} ranks x {self.slots_per_rank} slots cannot hold {self.experts} experts")
        for load in self.loads:
            try:
                zipf_exponent(load)
            except ArgumentError as error:
                problems += error.problems
        if problems:
            raise ArgumentError("bench balance", problems)

    @property
    def cases(self) -> int:
        """Pairs of a load and a drift, the noiseless step of each load included."""
        return len(self.loads) * (len(self.drifts) + 1)

    @property
    def load_shape(self) -> LoadShape:
        """The sizes of the load."""
        return LoadShape(self.layers, self.experts, self.pairs_per_step, self.steps)

    @property
    def start_up_layout(self) -> Layout:
        """The layout before any load is known."""
        redundant = self.ranks * self.slots_per_rank - self.experts
        return PlacementShape(self.layers, self.experts, self.ranks, redundant).start_up_layout()


@dataclass(frozen=True, slots=True)
class BalanceResult:
    """One policy under one load and drift; ratios are busiest over mean rank, means over all layers.

    Attributes:
        load: its name.
        drift: share of the experts that swap weights after each window; None: one step without chance, planned from
            the start-up layout and judged on that same step.
        policy: its name.
        planning_ratio: on the window that the plan was made from.
        next_ratio: on the window after it.
        moved_slots: slots of a layer that hold another expert than before.
        bytes: bytes that all layers' moves bring to another rank.
        seconds: processor time of planning all layers, the median of a few times.
        over_greedy: next_ratio less that of ``greedy``, mean of the continuations' differences.
        over_greedy_error: standard error of ``over_greedy``; 0 with a single continuation.
    """

    load: str
    drift: float | None
    policy: str
    planning_ratio: float
    next_ratio: float
    moved_slots: float
    bytes: int
    seconds: float
    over_greedy: float
    over_greedy_error: float


def run_balance(
    settings: BalanceSettings, *, clock: Clock = time.process_time, tick: Tick = no_tick
) -> BenchReport[BalanceResult]:
    """Run every policy over every load and drift; ``tick`` is called once for each pair of them.

    A policy plans from the start-up layout and a first window, the load drifts, it plans again from the second window
    (this plan is timed and counted), the load drifts, and the third window judges. All policies see the same windows.
    """
    results: list[BalanceResult] = []
    for load in settings.loads:
        for drift in settings.drifts:
            results += _drifting(settings, load, drift, clock)
            tick()
        results += _noiseless(settings, load, clock)
        tick()
    return BenchReport("balance", settings, describe_environment(), tuple(results))


@dataclass(frozen=True, slots=True)
class Planned:
    """One plan of a policy, and what it costs; figures as in :class:`BalanceResult`."""

    layout_LS: Layout
    planning_ratio: float
    moved_slots: float
    bytes: int
    seconds: float


def measured_plan(settings: Placement, name: str, window: LoadWindow, layout_LS: Layout, clock: Clock) -> Planned:
    """Let a policy plan from a window and the layout before it; how long that takes is the median of a few times."""
    seconds = []
    for _ in range(PLANNINGS):
        policy = make_policy(name)
        begun = clock()
        planned_LS = policy.plan(window, layout_LS, settings.ranks)
        seconds.append(clock() - begun)
    exchange = plan_exchange(layout_LS, planned_LS, settings.ranks, (ExpertPart("expert", settings.expert_bytes),))
    return Planned(
        layout_LS=planned_LS,
        planning_ratio=float(busiest_over_mean(window, planned_LS, settings.ranks).mean()),
        moved_slots=len(exchange.moves) / len(layout_LS),
        bytes=exchange.nbytes,
        seconds=median(seconds),
    )


def over_greedy(ratios: Ratios, greedy_ratios: Ratios) -> tuple[float, float]:
    """Return the mean of the differences and its standard error, 0 with a single one."""
    differences = ratios - greedy_ratios
    error = differences.std(ddof=1) / np.sqrt(differences.size) if differences.size > 1 else 0.0
    return round(float(differences.mean()), 6), round(float(error), 6)


def _drifting(settings: BalanceSettings, load: str, drift: float, clock: Clock) -> list[BalanceResult]:
    stream = LoadStream(load, settings.load_shape, settings.seed)
    first = stream.window()
    stream.drift(drift)
    second = stream.window()
    planned = {}
    for name in POLICY_NAMES:
        # "keep" has nothing of its own to keep: it keeps what the default policy made of the first window.
        start_LS = make_policy("balanced" if name == "keep" else name).plan(
            first, settings.start_up_layout, settings.ranks
        )
        planned[name] = measured_plan(settings, name, second, start_LS, clock)
    ratios = {name: np.empty(settings.continuations) for name in POLICY_NAMES}
    for number in range(settings.continuations):
        after = stream.continued(settings.seed, number + 1)
        after.drift(drift)
        third = after.window()
        for name in POLICY_NAMES:
            ratios[name][number] = busiest_over_mean(third, planned[name].layout_LS, settings.ranks).mean()
    return [_result(load, drift, name, planned[name], ratios[name], ratios["greedy"]) for name in POLICY_NAMES]


def _noiseless(settings: BalanceSettings, load: str, clock: Clock) -> list[BalanceResult]:
    step = LoadStream(load, settings.load_shape, settings.seed).noiseless_step()
    planned = {name: measured_plan(settings, name, step, settings.start_up_layout, clock) for name in POLICY_NAMES}
    ratios = {name: np.array([planned[name].planning_ratio]) for name in POLICY_NAMES}
    return [_result(load, None, name, planned[name], ratios[name], ratios["greedy"]) for name in POLICY_NAMES]


def _result(
    load: str,
    drift: float | None,
    name: str,
    planned: Planned,
    ratios: Ratios,
    greedy_ratios: Ratios,
) -> BalanceResult:
    difference, error = over_greedy(ratios, greedy_ratios)
    return BalanceResult(
        load=load,
        drift=drift,
        policy=name,
        planning_ratio=round(planned.planning_ratio, 6),
        next_ratio=round(float(ratios.mean()), 6),
        moved_slots=round(planned.moved_slots, 3),
        bytes=planned.bytes,
        seconds=round(planned.seconds, 4),
        over_greedy=difference,
        over_greedy_error=error,
    )
