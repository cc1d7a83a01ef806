"""Recorded loads: windows in order, each plan judged on the window after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.bench.balance_recorded import RecordedSettings, run_recorded
from deepinfer.errors import ArgumentError


def write(file: Path, steps: list[list[list[int]]]) -> Path:
    file.write_text(json.dumps({"counts": steps}), encoding="utf-8")
    return file


def test_a_steady_load_is_balanced_once_and_stays(tmp_path: Path) -> None:
    # Two ranks of two slots: experts 0 and 1 begin together and weigh nearly everything.
    file = write(tmp_path / "loads.json", [[[100, 100, 1, 1]]] * 30)
    results = {each.policy: each for each in run_recorded(RecordedSettings(file, ranks=2, slots_per_rank=2)).results}
    assert results["balanced"].next_ratio == pytest.approx(1.0)
    assert results["balanced"].moved_slots == pytest.approx(2 / 2)  # two slots, in the first of two plans
    assert results["keep"].next_ratio == pytest.approx(200 / 101)
    assert results["keep"].moved_slots == 0
    assert results["greedy"].over_greedy == 0


def test_the_window_after_judges(tmp_path: Path) -> None:
    calm, turned = [[[100, 1, 100, 1]]], [[[100, 100, 1, 1]]]
    file = write(tmp_path / "loads.json", calm * 10 + turned * 10)
    (keep,) = [
        each
        for each in run_recorded(RecordedSettings(file, ranks=2, slots_per_rank=2)).results
        if each.policy == "keep"
    ]
    assert keep.planning_ratio == pytest.approx(1.0)
    assert keep.next_ratio == pytest.approx(200 / 101, abs=1e-5)


def test_what_cannot_be_walked_is_refused_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "loads.json", [[[1, 2, 3]]] * 19)
    with pytest.raises(ArgumentError) as caught:
        run_recorded(RecordedSettings(file, ranks=2, slots_per_rank=1))
    assert len(caught.value.problems) == 2
    with pytest.raises(ArgumentError, match="steps"):
        RecordedSettings(file, steps=0)
