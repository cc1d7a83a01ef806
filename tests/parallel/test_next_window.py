"""The default policy judged where it counts: on windows that it has not seen, at full width and few layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from deepinfer.bench.balance_loads import DEFAULT_LOADS, LoadShape, LoadStream
from deepinfer.parallel.balanced import BalancedPolicy
from deepinfer.parallel.greedy import GreedyPolicy
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout, PlacementShape
from deepinfer.parallel.shares import busiest_over_mean

RANKS = 64
SHAPE = LoadShape(layers=8)
PLACEMENT = PlacementShape(SHAPE.layers, SHAPE.experts, RANKS, 64)
WORSE = 0.012
"""Three standard deviations of the difference of two even layouts on one window of ten steps."""


@dataclass(frozen=True)
class Chain:
    """A policy's two plans with drift between their windows, and a next window without drift."""

    start: Layout
    planned: Layout
    next_window: LoadWindow

    def ratios(self, layout: Layout) -> np.ndarray:
        return busiest_over_mean(self.next_window, layout, RANKS)

    @property
    def moved(self) -> float:
        return float((self.start != self.planned).sum() / SHAPE.layers)


def chain(load: str, drift: float, policy: BalancedPolicy | GreedyPolicy) -> Chain:
    stream = LoadStream(load, SHAPE, seed=5)
    start = policy.plan(stream.window(), PLACEMENT.start_up_layout(), RANKS)
    stream.drift(drift)
    planned = policy.plan(stream.window(), start, RANKS)
    return Chain(start, planned, stream.window())


@pytest.mark.parametrize("load", DEFAULT_LOADS)
def test_without_drift_nothing_moves_and_balance_is_better_than_greedy_s(load: str) -> None:
    balanced, greedy = (chain(load, 0.0, policy) for policy in (BalancedPolicy(), GreedyPolicy()))
    assert balanced.moved == 0
    assert greedy.moved > 370
    assert balanced.ratios(balanced.planned).mean() < greedy.ratios(greedy.planned).mean()


@pytest.mark.parametrize("load", DEFAULT_LOADS)
@pytest.mark.parametrize("drift", [0.05, 0.1, 0.2])
def test_with_drift_no_layer_gets_worse_than_it_was_and_few_slots_move(load: str, drift: float) -> None:
    made = chain(load, drift, BalancedPolicy())
    assert (made.ratios(made.planned) < made.ratios(made.start) + WORSE).all()
    assert made.ratios(made.planned).mean() < made.ratios(made.start).mean() - 0.05
    assert made.ratios(made.planned).max() < 1.08
    assert 0 < made.moved < 448 / 5 + 448 * drift / 5
    rows = np.sort(made.planned.reshape(-1, 7), axis=1)
    assert (np.diff(rows, axis=1) > 0).all()


@pytest.mark.parametrize("drift", [0.0, 0.05, 0.1, 0.2])
def test_of_800_layers_none_gets_worse_than_it_was(drift: float) -> None:
    shape = LoadShape(layers=40)
    placement = PlacementShape(shape.layers, shape.experts, RANKS, 64)
    layers = 0
    for load in DEFAULT_LOADS:
        for seed in range(100, 104):
            stream = LoadStream(load, shape, seed)
            start = BalancedPolicy().plan(stream.window(), placement.start_up_layout(), RANKS)
            stream.drift(drift)
            planned = BalancedPolicy().plan(stream.window(), start, RANKS)
            after = stream.window()
            before_L, after_L = (busiest_over_mean(after, layout, RANKS) for layout in (start, planned))
            assert (after_L < before_L + WORSE).all(), (load, seed)
            layers += len(after_L)
    assert layers == 800


@pytest.mark.parametrize("load", DEFAULT_LOADS)
def test_one_step_without_chance_is_nearly_even(load: str) -> None:
    step = LoadStream(load, SHAPE, seed=5).noiseless_step()
    excess = {
        policy.name: busiest_over_mean(step, policy.plan(step, PLACEMENT.start_up_layout(), RANKS), RANKS).mean() - 1
        for policy in (BalancedPolicy(), GreedyPolicy())
    }
    share = 1 / 10 if load in ("zipf-1.0", "zipf-1.2", "lognormal") else 1 / 3
    assert excess["balanced"] < excess["greedy"] * share


def test_a_burst_that_the_newer_half_of_the_window_does_not_show_moves_nothing() -> None:
    stream = LoadStream("zipf-0.8", SHAPE, seed=5)
    start = BalancedPolicy().plan(stream.window(), PLACEMENT.start_up_layout(), RANKS)
    counts = stream.window().counts_TLE.copy()
    counts[:5, :, 17] += 20_000
    assert BalancedPolicy().plan(LoadWindow(counts), start, RANKS).tolist() == start.tolist()
    counts[5:, :, 17] += 20_000
    assert (BalancedPolicy().plan(LoadWindow(counts), start, RANKS) != start).any(axis=1).all()
