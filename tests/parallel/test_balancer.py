"""A group of balancers: equal proposals on every rank, maps that switch with the weights, counting that goes on."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import ArgumentError, InvariantError
from deepinfer.parallel.balancer import ExpertBalancer, group_window
from deepinfer.parallel.exchange import ExpertPart, exchanged
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import PlacementShape
from deepinfer.parallel.policies import make_policy

SHAPE = PlacementShape(layers=2, experts=8, ranks=2, redundant=2)
PARTS = (ExpertPart("w", 64), ExpertPart("scale", 8))


def group(interval: int = 4) -> list[ExpertBalancer]:
    return [
        ExpertBalancer(SHAPE, make_policy("balanced"), PARTS, interval_steps=interval, window_steps=4) for _ in range(2)
    ]


def step(balancers: list[ExpertBalancer], hot: int, rows: int = 3000) -> list[bool]:
    """Rank 0 has rows, rank 1 is idle with one placeholder row."""
    generator = np.random.default_rng(hot)
    for layer in range(2):
        experts = generator.integers(0, 8, (rows, 2))
        experts[: rows // 3, 0] = hot
        balancers[0].counter.add(layer, experts, np.ones(rows, dtype=bool))
        balancers[1].counter.add(layer, experts[:1], np.zeros(1, dtype=bool))
    return [balancer.end_step() for balancer in balancers]


def test_plans_come_due_at_the_same_steps_on_busy_and_idle_ranks() -> None:
    balancers = group(interval=8)
    due = [step(balancers, 5) for _ in range(20)]
    assert [number for number, each in enumerate(due, 1) if each == [True, True]] == [2, 10, 18]
    assert all(each in ([True, True], [False, False]) for each in due)


def test_every_rank_proposes_the_same_bytes_and_counts_anew() -> None:
    balancers = group()
    step(balancers, 5)
    window = group_window([balancer.counter.window() for balancer in balancers])
    assert window.counts_TLE.sum(axis=2).tolist() == [[6000, 6000]]
    changes = [balancer.propose(window) for balancer in balancers]
    assert changes[0] is not None
    assert changes[1] is not None
    assert changes[0].after.layout_LS.tobytes() == changes[1].after.layout_LS.tobytes()
    assert changes[0].exchange == changes[1].exchange
    assert [balancer.counter.steps for balancer in balancers] == [0, 0]


def test_maps_switch_with_the_weights_for_fifty_moves_in_a_row() -> None:
    (balancer, other) = group()
    weights = np.arange(8)[balancer.maps.layout_LS] * 1000
    scales = np.arange(8)[balancer.maps.layout_LS] * -3
    switches = 0
    for number in range(50):
        step([balancer, other], number * 3 % 8)
        change = balancer.propose(balancer.counter.window())
        if change is not None:
            weights, scales = exchanged(weights, change.exchange), exchanged(scales, change.exchange)
            balancer.switch(change)
            switches += 1
        assert weights.tolist() == (np.arange(8)[balancer.maps.layout_LS] * 1000).tolist()
        assert scales.tolist() == (np.arange(8)[balancer.maps.layout_LS] * -3).tolist()
        assert balancer.counter.steps == 0
    assert switches > 20


def test_an_idle_window_proposes_nothing() -> None:
    balancer = group()[0]
    balancer.end_step()
    assert balancer.propose(balancer.counter.window()) is None
    assert balancer.maps.layout_LS.tolist() == SHAPE.start_up_layout().tolist()


def test_a_change_that_was_proposed_before_another_is_a_fault() -> None:
    balancers = group()
    step(balancers, 5)
    window = balancers[0].counter.window()
    first, second = balancers[0].propose(window), balancers[0].propose(window)
    assert first is not None
    assert second is not None
    balancers[0].switch(first)
    with pytest.raises(InvariantError, match="another layout"):
        balancers[0].switch(second)


def test_windows_of_different_steps_do_not_add_up() -> None:
    windows = [LoadWindow(np.ones((steps, 1, 2), dtype=np.int64)) for steps in (1, 2)]
    with pytest.raises(ArgumentError, match="one window a rank"):
        group_window(windows)
