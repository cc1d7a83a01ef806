"""The comparison policy is the described one: its worked examples come out as they were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.parallel.greedy import GreedyPolicy
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import PlacementShape
from deepinfer.parallel.shares import busiest_over_mean


def window(*steps: tuple[int, ...]) -> LoadWindow:
    return LoadWindow(np.array(steps, dtype=np.int64)[:, None])


def planned(load: LoadWindow, ranks: int, redundant: int) -> tuple[list[list[int]], float, float]:
    start = PlacementShape(1, load.experts, ranks, redundant).start_up_layout()
    layout = GreedyPolicy().plan(load, start, ranks)
    ratios = [float(busiest_over_mean(load, each, ranks)[0]) for each in (start, layout)]
    return layout.reshape(ranks, -1).tolist(), ratios[0], ratios[1]


def test_five_experts_on_two_ranks() -> None:
    layout, before, after = planned(window((90, 20, 20, 40, 30), (90, 40, 40, 10, 20)), 2, 1)
    assert layout == [[0, 1, 3], [0, 2, 4]]
    assert (before, after) == (1.2, 1.05)


def test_it_may_be_worse_than_what_it_replaces() -> None:
    layout, before, after = planned(window((76, 17, 55, 40), (6, 49, 37, 31), (9, 95, 51, 7), (66, 48, 50, 23)), 4, 4)
    assert layout == [[3, 1], [2, 0], [2, 1], [0, 1]]
    assert before == pytest.approx(1.1545, abs=5e-5)
    assert after == pytest.approx(1.3818, abs=5e-5)


def test_equal_hottest_experts_take_turns_whatever_the_size_of_the_counts() -> None:
    layout, _, after = planned(window((10, 10, 10, 10, 1_000_000, 1_000_000, 10, 10)), 4, 4)
    slots = [expert for rank in layout for expert in rank]
    assert (slots.count(4), slots.count(5)) == (3, 3)
    assert after == pytest.approx(1.3333, abs=5e-5)


def test_all_equal_loads_copy_the_lowest_ids() -> None:
    layout, _, _ = planned(window((7, 7, 7, 7, 7)), 2, 3)
    assert sorted(expert for rank in layout for expert in rank) == [0, 0, 1, 1, 2, 2, 3, 4]


def test_a_layer_without_load_keeps_its_layout() -> None:
    start = PlacementShape(2, 4, 2, 2).start_up_layout()
    counts = np.array([[[0, 0, 0, 0], [1, 2, 3, 9]]], dtype=np.int64)
    layout = GreedyPolicy().plan(LoadWindow(counts), start, 2)
    assert layout[0].tolist() == start[0].tolist()
    assert layout[1].tolist() != start[1].tolist()
