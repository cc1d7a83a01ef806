"""Counts are those of valid tokens alone, a window is the last steps, and plans come due on every rank alike."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer.errors import ArgumentError, InvariantError
from deepinfer.parallel.loads import MOST_PAIRS_PER_STEP, MOST_STEPS, LoadCounter, LoadWindow, ReplanClock


def rows(*experts: tuple[int, ...]) -> np.ndarray:
    return np.array(experts, dtype=np.int64)


def test_a_batch_padded_to_eight_counts_its_three_rows() -> None:
    counter = LoadCounter(layers=2, experts=4, window_steps=3)
    experts = rows((0, 1), (1, 2), (3, 0), *[(2, 3)] * 5)
    valid = np.array([True] * 3 + [False] * 5)
    for layer in range(2):
        counter.add(layer, experts, valid)
    counter.end_step()
    assert counter.window().counts_TLE.tolist() == [[[2, 2, 1, 1]] * 2]
    assert counter.window().counts_TLE.sum(axis=2).tolist() == [[3 * 2, 3 * 2]]


def test_an_idle_rank_counts_nothing_and_keeps_step() -> None:
    counter = LoadCounter(layers=1, experts=4, window_steps=3)
    counter.add(0, rows((0, 1)), np.array([False]))
    counter.end_step()
    counter.end_step()
    assert counter.steps == 2
    assert counter.window().counts_TLE.tolist() == [[[0, 0, 0, 0]]] * 2


def test_no_expert_counts_nowhere_and_an_unknown_one_is_a_fault() -> None:
    counter = LoadCounter(layers=1, experts=4, window_steps=1)
    counter.add(0, rows((-1, 3)), np.array([True]))
    counter.end_step()
    assert counter.window().counts_TLE.tolist() == [[[0, 0, 0, 1]]]
    with pytest.raises(InvariantError, match="layer 0"):
        counter.add(0, rows((4, 1)), np.array([True]))


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_a_window_is_the_last_steps_in_order(steps: int) -> None:
    counter = LoadCounter(layers=1, experts=1, window_steps=3)
    for step in range(steps):
        for _ in range(step + 1):  # several calls a step add up
            counter.add(0, rows((0,)), np.array([True]))
        counter.end_step()
    counter.add(0, rows((0,)), np.array([True]))  # a step that has not ended is not part of it
    assert counter.window().counts_TLE.ravel().tolist() == list(range(1, steps + 1))[-3:]


def test_a_counter_is_armed_again_after_a_plan() -> None:
    counter = LoadCounter(layers=1, experts=2, window_steps=3)
    counter.add(0, rows((1,)), np.array([True]))
    counter.end_step()
    counter.rearm()
    with pytest.raises(InvariantError, match="armed"):
        counter.window()
    counter.end_step()
    assert counter.window().counts_TLE.tolist() == [[[0, 0]]]


def test_the_first_plan_comes_at_a_quarter_of_the_interval() -> None:
    clock = ReplanClock(8)
    assert [step for step in range(1, 30) if clock.end_step()] == [2, 10, 18, 26]


def test_an_interval_of_one_plans_after_every_step() -> None:
    clock = ReplanClock(1)
    assert all(clock.end_step() for _ in range(5))


def test_the_newer_half_of_a_window_judges() -> None:
    older, newer = LoadWindow(np.arange(5, dtype=np.int64).reshape(5, 1, 1)).halves()
    assert older.counts_TLE.ravel().tolist() == [0, 1, 2]
    assert newer.counts_TLE.ravel().tolist() == [3, 4]


@pytest.mark.parametrize(
    "counts",
    [
        np.full((1, 1, 2), np.nan),
        np.zeros((0, 1, 2), dtype=np.int64),
        np.zeros((2, 2), dtype=np.int64),
        np.full((1, 1, 2), -1, dtype=np.int64),
        np.full((1, 1, 2), MOST_PAIRS_PER_STEP, dtype=np.int64),
        np.zeros((MOST_STEPS + 1, 1, 1), dtype=np.int64),
    ],
    ids=["NaN", "no step", "two dimensions", "negative", "too much", "too long"],
)
def test_what_is_no_window_is_refused(counts: np.ndarray) -> None:
    with pytest.raises(ArgumentError, match="load window"):
        LoadWindow(counts)


def test_impossible_counters_and_clocks_are_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        LoadCounter(layers=0, experts=0, window_steps=0)
    assert len(caught.value.problems) == 3
    with pytest.raises(ArgumentError, match="interval_steps"):
        ReplanClock(0)


@pytest.mark.parametrize(("steps", "most", "sums"), [(5, 5, 5), (5, 4, 3), (9, 2, 2), (7, 1, 1), (1, 3, 1)])
def test_a_long_window_is_folded_into_sums_of_neighbours_the_newest_whole(steps: int, most: int, sums: int) -> None:
    counts = np.arange(steps * 2, dtype=np.int64).reshape(steps, 1, 2)
    folded = LoadWindow(counts).folded(most)
    assert folded.steps == sums
    assert folded.totals().tolist() == counts.sum(axis=0).tolist()
    size = -(-steps // most)
    assert folded.counts_TLE[-1].tolist() == counts[-size:].sum(axis=0).tolist()


def test_counts_of_a_device_add_up_with_those_of_rows() -> None:
    counter = LoadCounter(layers=2, experts=3, window_steps=2)
    counter.add(1, rows((0, 2)), np.array([True]))
    counter.add_counts(np.array([[1, 0, 0], [0, 0, 5]]))
    counter.end_step()
    assert counter.window().counts_TLE.tolist() == [[[1, 0, 0], [1, 0, 6]]]
