"""The ladder skips nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from deepinfer_conformance.levels import NOTHING, Standing, ladder, level_reached
from deepinfer_conformance.outcomes import CaseResult, Level, Outcome

Results = tuple[CaseResult, ...]
Claims = dict[str, Any]


@pytest.fixture
def claims(facts: dict[str, Any]) -> Claims:
    """What a driver of one rank claims that records no graphs."""
    return {**facts["claims"], "collectives": [], "graphs": False}


def _with(results: Results, level: Level, outcome: Outcome) -> list[CaseResult]:
    first = next(result.id for result in results if result.level is level)
    return [dataclasses.replace(each, outcome=outcome) if each.id == first else each for each in results]


def _unclaimed(results: Results) -> list[CaseResult]:
    """What a driver without ranks and graphs does not claim."""
    return [
        dataclasses.replace(each, outcome=Outcome.NOT_CLAIMED)
        if each.level is Level.L3 or each.check == "graph"
        else each
        for each in results
    ]


def test_optional_levels_that_are_not_claimed_are_passed_over(passing: Results, claims: Claims) -> None:
    states = ladder(_unclaimed(passing), claims)
    assert [state.standing for state in states if state.level in (Level.L3, Level.L4)] == [Standing.NOT_APPLICABLE] * 2
    assert level_reached(states) == "L7"


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.ERROR, Outcome.CRASH, Outcome.TIMEOUT])
def test_one_broken_case_ends_the_ladder_below_its_level(passing: Results, claims: Claims, outcome: Outcome) -> None:
    for level in (Level.L0, Level.L2, Level.L5):
        states = ladder(_with(passing, level, outcome), claims)
        below = [state for state in Level if state < level]
        reached = [state.name for state in below if state not in (Level.L3, Level.L4)]
        assert level_reached(states) == (reached[-1] if reached else NOTHING)
        assert states[level].standing is Standing.FAILED


def test_an_optional_level_that_fails_is_not_passed_over(passing: Results, claims: Claims) -> None:
    states = ladder(_with(tuple(_unclaimed(passing)), Level.L4, Outcome.FAIL), claims)
    assert level_reached(states) == "L2"


def test_a_level_that_was_not_run_ends_the_ladder(passing: Results, claims: Claims) -> None:
    states = ladder([result for result in passing if result.check != "numerics"], claims)
    assert level_reached(states) == "L0"
    assert states[Level.L1].standing is Standing.NOT_RUN


def test_an_empty_driver_reaches_nothing(passing: Results) -> None:
    nothing = {"ops": {}, "declared_fallbacks": [], "graphs": False, "collectives": []}
    assert level_reached(ladder(passing, nothing)) == NOTHING


def test_an_op_that_is_neither_native_nor_named_stops_at_l0(passing: Results, claims: Claims) -> None:
    fewer = {**claims, "ops": {op: each for op, each in claims["ops"].items() if op != "norm.rms"}}
    assert level_reached(ladder(passing, fewer)) == "L0"
    named = {**fewer, "declared_fallbacks": ["norm.rms"]}
    assert level_reached(ladder(_unclaimed(passing), named)) == "L7"


def test_claiming_nothing_of_a_check_does_not_reach_its_level(passing: Results, claims: Claims) -> None:
    silent = [
        dataclasses.replace(each, outcome=Outcome.NOT_CLAIMED) if each.level is Level.L6 else each for each in passing
    ]
    assert level_reached(ladder(silent, claims)) == "L5"


def test_r1_claims_stop_at_l1(passing: Results, claims: Claims) -> None:
    weak = {op: {**claim, "repeatability": "R1"} for op, claim in claims["ops"].items()}
    states = ladder(passing, {**claims, "ops": weak})
    assert level_reached(states) == "L1"
    assert "below R2" in states[Level.L2].why


def test_ranks_that_are_claimed_are_a_rung_like_any_other(passing: Results, claims: Claims) -> None:
    claimed = {**claims, "collectives": ["gloo"]}
    assert ladder(passing, claimed)[Level.L3].standing is Standing.REACHED
    assert level_reached(ladder(_with(passing, Level.L3, Outcome.FAIL), claimed)) == "L2"
    assert level_reached(ladder(_unclaimed(passing), claimed)) == "L2"
