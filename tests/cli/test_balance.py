"""`deepinfer balance plan` shows before and after, writes a plan that it can read again, and refuses nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
TIES = [[[10, 10, 10, 10, 1_000_000, 1_000_000, 10, 10]]]


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps({"counts": TIES}))
    return file


def test_a_plan_evens_out_the_ranks_and_says_what_it_moves(run: Run, loads: Path) -> None:
    ran = run("balance", "plan", loads, "--ranks", 4, "--slots", 3, "--expert-bytes", 1000)
    assert ran.status == 0, ran.err
    assert "busiest over mean rank, all layers: 3.9999 -> 1.0000" in ran.out
    assert "6 slots change, 6 of them from another rank: 5.9 KiB" in ran.out
    (busiest,) = (line for line in ran.out.splitlines() if line.startswith("rank   1"))
    assert busiest.split() == ["rank", "1", "#" * 30, "4.000", "#" * 8, "1.000"]


def test_a_written_plan_is_a_layout_that_the_next_plan_starts_from(run: Run, loads: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run("balance", "plan", loads, "--ranks", 4, "--slots", 3, "--output", plan).status == 0
    written = json.loads(plan.read_text())
    assert (written["ranks"], written["slots_per_rank"], written["moved_slots"]) == (4, 3, [6])
    assert sorted(written["layout"][0]).count(4) == 2
    ran = run("balance", "plan", loads, "--ranks", 4, "--current", plan)
    assert "0 slots change" in ran.out
    assert "1.0000 -> 1.0000" in ran.out


def test_without_slots_the_fewest_that_hold_all_experts_are_planned(run: Run, loads: Path) -> None:
    assert "8 experts on 4 ranks x 2 slots" in run("balance", "plan", loads, "--ranks", 4, "--policy", "keep").out


def test_many_ranks_and_layers_are_shortened_and_the_output_says_so(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "loads.json"
    counts = [[[(layer * 7 + expert * expert) % 50 for expert in range(40)] for layer in range(10)]]
    file.write_text(json.dumps({"counts": counts}))
    out = run("balance", "plan", file, "--ranks", 20, "--slots", 2).out
    assert "(2 layers that were more even are not shown)" in out
    assert "(4 ranks in the middle are not shown)" in out
    assert sum(line.startswith("rank ") for line in out.splitlines()) == 16


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1", "no JSON"),
        ("[]", "no 'counts' in it"),
        ('{"counts": [[1], [1, 2]]}', "ragged"),
        ('{"counts": [[[1.5]]]}', "type float64"),
        ('{"counts": [[1, 2]]}', "shape (1, 2)"),
        ('{"counts": [[[-1, 2]]]}', "counts start at 0"),
        (f'{{"counts": [[[{2**63 - 1}]]]}}', "more than 16777216 pairs"),
        (f'{{"counts": [[[{2**64 - 1}]]]}}', "'counts' holds 18446744073709551615; "),
        (f'{{"counts": [[[1, {2**63}]]]}}', "'counts' holds 9223372036854775808; "),  # beside 1: no integers to numpy
        (f'{{"counts": [[[1, {2**64}]]]}}', "'counts' holds 18446744073709551616; "),
        (f'{{"counts": [[[0.5, {2**64}]]]}}', "type object"),
    ],
)
def test_a_file_that_holds_no_loads_is_refused(run: Run, tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "loads.json"
    file.write_text(text)
    ran = run("balance", "plan", file)
    assert ran.status == 2
    assert problem in ran.err
    assert ran.out == ""


def test_wrong_numbers_are_refused_at_once(run: Run, loads: Path) -> None:
    ran = run(
        "balance", "plan", loads, "--ranks", 0, "--slots", 0, "--expert-bytes", 0, "--output", "/no/such/plan.json"
    )
    assert ran.status == 2
    assert ran.err.count("\n  - ") == 4
    assert "cannot hold 8 experts" in run("balance", "plan", loads, "--ranks", 2, "--slots", 3).err


def test_slots_that_contradict_the_current_layout_are_refused(run: Run, loads: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"layout": [list(range(8))]}))
    ran = run("balance", "plan", loads, "--ranks", 2, "--slots", 5, "--current", plan)
    assert ran.status == 2
    assert "--current has 8 slots" in ran.err


def test_a_layout_of_numbers_that_no_layout_holds_is_refused(run: Run, loads: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"layout": [[*range(7), 2**32 + 7]]}))  # its lower half is 7
    ran = run("balance", "plan", loads, "--ranks", 2, "--current", plan)
    assert ran.status == 2
    assert "'layout' holds 4294967303; " in ran.err


@pytest.mark.parametrize("text", ["[" * 100_000, '{"counts": [[[' + "9" * 5000 + "]]]}"])
def test_a_file_that_json_cannot_hold_is_refused_in_words(run: Run, tmp_path: Path, text: str) -> None:
    file = tmp_path / "loads.json"
    file.write_text(text)
    ran = run("bench", "balance", "--recorded", file, "--ranks", 4, "--slots", 3)
    assert ran.status == 2
    assert "no JSON" in ran.err


def test_recorded_loads_take_no_options_of_made_up_ones(run: Run, loads: Path) -> None:
    ran = run("bench", "balance", "--recorded", loads, "--ranks", 4, "--slots", 3, "--layers", 3, "--seed", 7)
    assert ran.status == 2
    assert "--layers, --seed: for made-up loads only" in ran.err


def test_an_evaluation_does_not_write_two_things_into_one_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "both.json"
    ran = run("eval", "--limit", 0, "--save-loads", file, "--save-result", file)
    assert ran.status == 2
    assert "each needs a file of its own" in ran.err
