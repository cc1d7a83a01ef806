"""The default policy on small cases: never worse, near the optimum, no expert twice on a rank, the same everywhere."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from itertools import combinations_with_replacement, permutations

import numpy as np
import pytest

from deepinfer.errors import ArgumentError
from deepinfer.parallel.balanced import BalancedPolicy
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout, PlacementShape, ReplicaMaps
from deepinfer.parallel.policies import POLICY_NAMES, make_policy
from deepinfer.parallel.shares import busiest_loads, busiest_over_mean

BOLD = BalancedPolicy(move_cost_permille=0, least_gain_permille=0, caution_percent=0)


def window(*steps: tuple[int, ...]) -> LoadWindow:
    return LoadWindow(np.array(steps, dtype=np.int64)[:, None])


def twice_on_a_rank(layout: Layout, ranks: int) -> int:
    rows = np.sort(layout.reshape(-1, layout.shape[1] // ranks), axis=1)
    return int((np.diff(rows, axis=1) == 0).sum())


def test_the_worked_example_is_solved_where_every_step_is_believed() -> None:
    load = window((90, 20, 20, 40, 30), (90, 40, 40, 10, 20))
    start = PlacementShape(1, 5, 2, 1).start_up_layout()
    assert busiest_over_mean(load, BOLD.plan(load, start, 2), 2).tolist() == [1.05]


def test_a_start_up_layout_that_is_better_is_kept() -> None:
    load = window((76, 17, 55, 40), (6, 49, 37, 31), (9, 95, 51, 7), (66, 48, 50, 23))
    start = PlacementShape(1, 4, 4, 4).start_up_layout()
    for policy in (BOLD, BalancedPolicy()):
        assert policy.plan(load, start, 4).tolist() == start.tolist()


def test_equal_hot_experts_get_as_many_copies_as_balance_needs() -> None:
    load = window((10, 10, 10, 10, 1_000_000, 1_000_000, 10, 10))
    start = PlacementShape(1, 8, 4, 4).start_up_layout()
    layout = BalancedPolicy().plan(load, start, 4)
    assert busiest_over_mean(load, layout, 4)[0] == pytest.approx(1.0, abs=1e-4)
    slots = layout[0].tolist()
    assert (slots.count(4), slots.count(5)) == (2, 2)


@pytest.mark.parametrize("experts", [5, 7, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("redundant", [0, 1, 2, 3, 5, 9])
def test_awkward_sizes_and_loads_give_true_layouts(experts: int, ranks: int, redundant: int) -> None:
    shape = PlacementShape(4, experts, ranks, redundant)
    generator = np.random.default_rng(experts * 100 + ranks * 10 + redundant)
    equal = np.full(experts, 9)
    lone = np.eye(experts, dtype=np.int64)[experts - 1] * 1000
    counts = np.stack([equal, np.zeros(experts), lone, generator.integers(0, 500, experts)]).astype(np.int64)[None]
    start = shape.start_up_layout()
    layout = BOLD.plan(LoadWindow(counts), start, ranks)
    ReplicaMaps.of(layout, shape)
    assert layout[1].tolist() == start[1].tolist()
    if shape.slots_per_rank <= experts:
        changed = np.flatnonzero((layout != start).any(axis=1))
        assert twice_on_a_rank(layout[changed], ranks) == 0
    again = BOLD.plan(LoadWindow(counts), layout, ranks)
    ReplicaMaps.of(again, shape)


def test_no_plan_is_worse_on_its_window_than_what_it_replaces() -> None:
    generator = np.random.default_rng(1)
    for _ in range(12):
        experts, ranks, steps = generator.integers(3, 9), generator.integers(2, 5), generator.integers(1, 7)
        shape = PlacementShape(6, int(experts), int(ranks), int(generator.integers(0, 8)))
        start = np.stack([generator.permutation(row) for row in shape.start_up_layout()]).astype(np.int32)
        load = LoadWindow(generator.integers(0, 100, (steps, 6, experts)))
        for policy in (BOLD, BalancedPolicy()):
            layout = policy.plan(load, start, int(ranks))
            shape.check(layout)
            before, after = (busiest_loads(load, each, int(ranks)).sum(axis=0) for each in (start, layout))
            changed = (layout != start).any(axis=1)
            assert (after[changed] < before[changed]).all()


@lru_cache
def all_layouts(experts: int, ranks: int, each: int) -> Layout:
    """All layouts that put no expert twice on a rank, but for the order of ranks and slots, by brute force."""
    found: set[tuple[tuple[int, ...], ...]] = set()
    for copies in combinations_with_replacement(range(experts), ranks * each - experts):
        slots = sorted([*range(experts), *copies])
        for order in set(permutations(slots)):
            layout = tuple(sorted(tuple(sorted(order[i * each : (i + 1) * each])) for i in range(ranks)))
            if all(len(set(rank)) == each for rank in layout):
                found.add(layout)
    return np.array([[slot for rank in layout for slot in rank] for layout in sorted(found)], dtype=np.int32)


@pytest.mark.parametrize(("experts", "ranks", "each"), [(3, 2, 2), (4, 2, 3), (5, 2, 3), (4, 3, 2), (5, 3, 2)])
def test_small_cases_are_near_the_optimum(experts: int, ranks: int, each: int) -> None:
    generator = np.random.default_rng(7)
    layouts = all_layouts(experts, ranks, each)
    shape = PlacementShape(40, experts, ranks, ranks * each - experts)
    load = LoadWindow(generator.integers(1, 200, (1, 40, experts)))
    planned = busiest_over_mean(load, BOLD.plan(load, shape.start_up_layout(), ranks), ranks)
    optimum = []
    for layer in range(40):
        alone = load.of_layers(np.array([layer]))
        optimum.append(min(busiest_over_mean(alone, layout[None], ranks)[0] for layout in layouts))
    best = np.array(optimum)
    gap = planned / best - 1
    assert gap.min() >= -1e-12
    assert gap.mean() < 0.02


def test_a_layer_s_plan_does_not_depend_on_other_layers() -> None:
    generator = np.random.default_rng(3)
    shape = PlacementShape(6, 48, 8, 8)
    load = LoadWindow(generator.poisson(generator.gamma(0.5, 200.0, (6, 48)), (6, 6, 48)).astype(np.int64))
    layout = BalancedPolicy().plan(load, shape.start_up_layout(), 8)
    after = LoadWindow(np.roll(load.counts_TLE, 5, axis=2))
    again = BalancedPolicy().plan(after, layout, 8)
    assert (layout != shape.start_up_layout()).any(axis=1).all()
    for layer in range(6):
        one = np.array([layer])
        alone = BalancedPolicy().plan(load.of_layers(one), shape.start_up_layout()[one], 8)
        assert alone[0].tolist() == layout[layer].tolist()
        assert BalancedPolicy().plan(after.of_layers(one), layout[one], 8)[0].tolist() == again[layer].tolist()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_plans_are_the_same_bytes_on_every_platform(name: str) -> None:
    # Counts by a formula, not by a generator of numpy: the digests are what every rank must compute.
    step, layer, expert = np.ogrid[:6, :5, :64]
    counts = (expert * 7919 + layer * 104_729) % 997 ** (1 + expert % 2) % 5000 + (step * 31 + expert * 17) % 41
    shape = PlacementShape(5, 64, 8, 16)
    load = LoadWindow(np.broadcast_to(counts, (6, 5, 64)).astype(np.int64))
    layout = make_policy(name).plan(load, shape.start_up_layout(), 8)
    layout = make_policy(name).plan(LoadWindow(np.roll(load.counts_TLE, 1, axis=1)), layout, 8)
    assert sha256(layout.astype("<i4").tobytes()).hexdigest()[:16] == DIGESTS[name]


DIGESTS = {"keep": "90922601283fab92", "greedy": "0fcd081e089cf8f2", "balanced": "d162559d49e74190"}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_inputs_that_do_not_belong_together_are_refused_at_once(name: str) -> None:
    load = window((1, 2, 3, 4))
    with pytest.raises(ArgumentError) as caught:
        make_policy(name).plan(load, np.zeros((2, 3), dtype=np.int32), 2)
    assert len(caught.value.problems) == 3
    with pytest.raises(ArgumentError, match="int32"):
        make_policy(name).plan(load, np.zeros((1, 4)), 2)
    with pytest.raises(ArgumentError, match="these alone"):
        make_policy(name).plan(load, np.array([[0, 1, 2, 2]], dtype=np.int32), 2)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="keep, greedy, balanced"):
        make_policy("best")


def test_negative_costs_are_refused_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        BalancedPolicy(move_cost_permille=-1, least_gain_permille=-1, caution_percent=-1)
    assert len(caught.value.problems) == 3
