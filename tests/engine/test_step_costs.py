"""Costs of decode steps: measured by a clock that the test turns, corrected by steps, kept by what they depend on."""

from __future__ import annotations

import errno
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from deepinfer.engine.cost_curves import CurveFolder
from deepinfer.engine.draft_tally import DraftTally
from deepinfer.engine.step_costs import NEWEST_TIMES, StepCosts, is_time, measure_curve
from deepinfer.engine.verify_lengths import VerifyLengths
from deepinfer.sampling.verify_budget import CostCurve, choose_drafts

CURVE = CostCurve((1, 2, 4, 8), (1.0, 1.1, 1.3, 1.7))
FACTS = {"device": "a", "versions": {"torch": "2"}, "drafts": 3, "sizes": [1, 2, 4, 8], "is_padded": True}


class Turned:
    """A clock that stands still unless it is turned."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_run_the_best_and_the_worst_do_not_count() -> None:
    clock, prepared = Turned(), []

    def prepare(size: int) -> Callable[[], object]:
        prepared.append(size)
        took: Iterator[float] = iter([1000.0, 9.0 * size, 1.0 * size, 4.0 * size, 2.0 * size, 3.0 * size])

        def run() -> None:
            clock.now += next(took)

        return run

    assert measure_curve((1, 4), prepare, clock, is_padded=False) == CostCurve((1, 4), (3.0, 12.0), is_padded=False)
    assert prepared == [1, 4]


def test_fewer_than_ten_steps_correct_nothing() -> None:
    costs = StepCosts(CURVE)
    for _ in range(9):
        costs.note(8, 5.0, 0.5)
    assert costs.curve == CURVE
    costs.note(8, 5.0, 0.5)
    assert costs.curve != CURVE


def test_a_measured_slope_and_height_correct_every_size() -> None:
    costs = StepCosts(CURVE)
    for rows in (1, 2, 4, 8) * 3:
        costs.note(rows, CURVE.of(rows) + 0.25 + 0.5 * rows, 0.0)
    assert costs.curve.seconds == pytest.approx([1.75, 2.35, 3.55, 5.95])


def test_steps_of_one_size_say_how_fast_the_machine_is() -> None:
    costs = StepCosts(CURVE)
    for _ in range(10):
        costs.note(4, 2.6, 0.0)
    assert costs.curve.seconds == pytest.approx([2.0, 2.2, 2.6, 3.4])


def test_a_size_that_was_run_a_few_times_costs_what_it_took_however_seldom_that_was() -> None:
    costs = StepCosts(CURVE)
    for _ in range(3):
        costs.note(1, 1.0, 0.0)
    for _ in range(200):
        costs.note(4, 2.0, 0.0)
        costs.note(8, 1.7, 0.0)
    assert costs.curve.seconds == pytest.approx([1.0, CURVE.of(2) + 0.7 / 3, 2.0, 2.0])
    costs.note(2, 9.0, 0.0)  # once is not a few times
    assert costs.curve.seconds[0::2] == pytest.approx([1.0, 2.0])


def test_steps_between_two_sizes_count_for_the_nearer_one() -> None:
    costs = StepCosts(CostCurve((8, 16, 32), (1.0, 2.0, 4.0), is_padded=False))
    for rows in (9, 10, 11, 14, 17, 20):
        for _ in range(3):
            costs.note(rows, costs.measured.of(rows) * (1.5 if rows < 12 else 1.125), 0.0)
    assert costs.curve.seconds[:2] == pytest.approx([1.5, 2.25])


def test_a_slower_machine_is_slower_for_every_size() -> None:
    """What was learnt of a size that is not run now is no less true: all costs are kept at one pace."""
    costs = StepCosts(CURVE)
    for rows in (1, 8) * NEWEST_TIMES:
        costs.note(rows, 2.0 * CURVE.of(rows), 0.25)
    learnt = costs.curve
    assert (costs.pace, learnt.seconds) == (1.0, pytest.approx([2.0 * each for each in CURVE.seconds]))
    for _ in range(30):
        costs.note(8, 2.0 * CURVE.of(8) * 1.5, 0.25 * 1.5)
    assert costs.pace == pytest.approx(1.5)
    assert costs.curve.seconds == pytest.approx(learnt.seconds)
    assert costs.sampler_s == pytest.approx(0.25)
    for _ in range(10):
        costs.note(1, 2.0 * CURVE.of(1), 0.25)
    assert costs.pace == pytest.approx(1.0)
    assert costs.curve.seconds == pytest.approx(learnt.seconds)


def test_a_size_that_is_run_all_the_time_does_not_drift_away_from_one_that_is_not() -> None:
    """A machine that becomes slower bit by bit, unnoticed from one step to the next."""
    costs = StepCosts(CURVE)
    for rows in (1, 8) * NEWEST_TIMES:
        costs.note(rows, CURVE.of(rows), 0.0)
    for step in range(400):
        costs.note(8, CURVE.of(8) * 1.002**step, 0.0)
    assert costs.pace == pytest.approx(1.002**399, rel=0.02)
    assert costs.curve.seconds == pytest.approx(CURVE.seconds, rel=0.02)


def test_what_is_run_for_the_first_time_says_nothing_of_the_pace() -> None:
    costs = StepCosts(CURVE)
    for _ in range(NEWEST_TIMES):
        costs.note(8, CURVE.of(8), 0.0)
    for _ in range(NEWEST_TIMES):
        costs.note(1, 1.5 * CURVE.of(1), 0.0)
    assert costs.pace == 1.0
    assert costs.curve.seconds[0] == pytest.approx(1.5)


def test_single_slow_steps_and_small_differences_are_no_other_pace() -> None:
    costs = StepCosts(CURVE)
    for _ in range(20):
        for factor in (1.0, 1.08, 40.0, 1.05, 0.95):
            costs.note(4, CURVE.of(4) * factor, 0.0)
    assert costs.pace == 1.0


def test_single_slow_steps_and_absurd_slopes_leave_a_curve_that_rises() -> None:
    costs = StepCosts(CURVE)
    for rows, took in [(1, 1.0), (8, 1.7)] * 5 + [(8, 400.0)]:
        costs.note(rows, took, 0.0)
    assert costs.curve.seconds == pytest.approx(CURVE.seconds)
    falling = StepCosts(CURVE)
    for rows, took in [(1, 9.0), (8, 0.001)] * 5:
        falling.note(rows, took, 0.0)
    assert list(falling.curve.seconds) == sorted(falling.curve.seconds)
    assert min(falling.curve.seconds) > 0


def test_the_samplers_time_is_a_median_of_the_last_nine_and_of_at_least_five() -> None:
    costs = StepCosts(CURVE)
    for nth in range(4):
        costs.note(1, 1.0, float(nth))
        assert costs.sampler_s == 0.0
    costs.note(1, 1.0, 100.0)
    assert costs.sampler_s == 2.0
    for _ in range(9):
        costs.note(1, 1.0, 7.0)
    assert costs.sampler_s == 7.0


def test_lengths_follow_chances_and_costs_and_are_never_worse_than_fixed_ones() -> None:
    chances_Rn = np.array([[0.9, 0.8], [0.3, 0.1]])
    costs = StepCosts(CostCurve((2, 4, 6), (1.0, 1.1, 3.0)))
    lengths = VerifyLengths(costs, lambda rows_R, epoch_R: chances_Rn)
    rows_R = np.arange(2)
    assert lengths.choose(rows_R, rows_R, np.array([2, 2])).tolist() == [2, 0]
    assert lengths.choose(rows_R, rows_R, np.array([1, 2])).tolist() == [1, 1]
    for _ in range(10):
        costs.note(6, 0.3, 0.2)  # everything turns out to be ten times cheaper but the sampler
    chosen = choose_drafts(chances_Rn, costs.curve, costs.sampler_s)
    fixed = (2 + chances_Rn.sum()) / (costs.curve.of(6) + costs.sampler_s)
    assert chosen.tokens_per_s >= fixed
    assert lengths.choose(rows_R[:0], rows_R[:0], rows_R[:0]).tolist() == []


def test_a_curve_is_found_by_all_that_it_depends_on_and_by_nothing_less(tmp_path: Path) -> None:
    folder = CurveFolder(tmp_path / "made")
    assert folder.find(FACTS) is None
    assert folder.keep(FACTS, CURVE)
    assert folder.find(FACTS) == CURVE
    for name in ("device", "versions", "drafts", "is_padded"):
        assert folder.find({**FACTS, name: "another"}) is None
    assert folder.keep(FACTS, CostCurve(CURVE.sizes, (2.0, 2.0, 2.0, 2.0)))
    assert folder.find(FACTS).seconds == (2.0, 2.0, 2.0, 2.0)
    assert len(list(folder.folder.iterdir())) == 1


def test_nothing_that_is_not_ours_is_ever_deleted_or_overwritten(tmp_path: Path) -> None:
    folder = CurveFolder(tmp_path)
    (tmp_path / "cost-curve-of-somebody.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    mine = folder.file(FACTS)
    kept = {"format": 1, "facts": FACTS, "sizes": [1, 2, 4, 8], "seconds": [1, 2, 3, "x"]}
    foreign = [
        "",
        "not json",
        "[]",
        "{}",
        json.dumps(kept),
        json.dumps({**kept, "format": 2, "seconds": [1] * 4}),
        "[" * 100_000,
    ]
    for content in foreign:
        mine.write_text(content)
        assert folder.find(FACTS) is None
        assert not folder.keep(FACTS, CURVE)
        assert mine.read_text() == content
    mine.unlink()
    assert folder.keep(FACTS, CURVE)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_place_where_nothing_can_be_kept_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (CurveFolder(tmp_path / "file"), CurveFolder(tmp_path / ("long" * 100))):
        assert folder.find(FACTS) is None
        assert not folder.keep(FACTS, CURVE)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(content: object, file: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    folder = CurveFolder(tmp_path)
    monkeypatch.setattr(json, "dump", fill)
    assert folder.keep(FACTS, CURVE) is False
    assert list(tmp_path.iterdir()) == []


def test_what_was_expected_of_drafts_is_compared_with_what_became_of_them() -> None:
    tally = DraftTally(3)
    assert tally.confidence_error == 0.0
    chances_Rn = np.array([[0.5, 0.25, 0.1], [0.5, 0.25, 0.1], [0.9, 0.9, 0.9]])
    tally.note(np.array([2, 1, 0]), np.array([1, 0, 0]), chances_Rn)
    assert tally.verified_n.tolist() == [2, 1, 0]
    assert tally.accepted_n.tolist() == [1, 0, 0]
    assert tally.confidence_error == pytest.approx((0 + 0.25) / 3)
    tally.note(np.array([3, 3, 3]), np.array([3, 0, 2]), np.zeros((3, 3)))
    assert tally.accepted_n.tolist() == [3, 2, 1]


def test_verified_drafts_are_counted_by_the_range_of_their_chance() -> None:
    tally = DraftTally(2)
    tally.note(np.array([2, 1]), np.array([1, 1]), np.array([[1.0, 0.95], [0.25, 0.1]]))
    filled = {number: each for number, each in enumerate(tally.chance_ranges) if each.verified}
    assert filled == {2: (1, 0.25, 1), 9: (2, pytest.approx(1.95), 1)}


def test_a_clock_that_sees_no_step_still_gives_a_curve() -> None:
    curve = measure_curve((1, 2), lambda size: lambda: None, Turned(), is_padded=True)
    assert all(cost > 0 for cost in curve.seconds)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_times_of_a_broken_clock_are_none(wrong: float) -> None:
    readings = itertools.cycle((0.0, wrong))
    curve = measure_curve((1, 2), lambda size: lambda: None, lambda: next(readings), is_padded=True)
    assert all(0 < cost < 1 for cost in curve.seconds)
    assert not is_time(wrong)
    assert is_time(0.0)


def test_a_chance_that_is_no_number_spoils_no_count() -> None:
    tally = DraftTally(2)
    tally.note(np.array([2, 2]), np.array([1, 0]), np.array([[0.5, 0.25], [np.nan, np.nan]]))
    assert tally.confidence_error == pytest.approx((0.5 + 0.25) / 4)
    assert np.isfinite(tally.corrections_n).all()
