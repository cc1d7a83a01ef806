"""The catalogue covers the contract, and a choice that matches nothing is an error with help."""

from __future__ import annotations

import pytest

from deepinfer.accelerator import all_op_names
from deepinfer.errors import ArgumentError
from deepinfer_conformance.catalogue import catalogue, checks, chosen, parse_level, parse_profile
from deepinfer_conformance.levels import must_pass
from deepinfer_conformance.mutants import MUTANTS
from deepinfer_conformance.outcomes import Level

CASES = catalogue(0, "quick")


def test_case_ids_are_unique_in_both_profiles() -> None:
    for cases in (CASES, catalogue(0, "full")):
        ids = [case.id for case in cases]
        assert len(ids) == len(set(ids))


def test_the_full_profile_holds_every_quick_case() -> None:
    assert {case.id for case in CASES} <= {case.id for case in catalogue(0, "full")}


@pytest.mark.parametrize("check", ["refusal", "read_only", "unwritten", "repetition"])
def test_every_op_has_a_case_of_every_habit(check: str) -> None:
    prepares = {"linear.prepare", "linear.prepare_grouped", "experts.prepare", "experts.prepare_shared"}
    wanted = set(all_op_names()) - (prepares if check != "refusal" else set())
    assert wanted <= {case.op for case in CASES if case.check == check}


def test_every_op_is_measured() -> None:
    assert set(all_op_names()) == {case.op for case in CASES if case.check in ("numerics", "prepared")}


def test_every_check_is_on_the_must_pass_list_of_its_level_and_has_a_mutant() -> None:
    listed = {f"{level.name}/{check}" for level, names in must_pass().items() for check in names}
    assert listed == set(checks()) == set(MUTANTS)


def test_cases_run_level_by_level() -> None:
    levels = [case.level for case in CASES]
    assert levels == sorted(levels)


def test_seeds_change_inputs_and_nothing_else() -> None:
    others = catalogue(1, "quick")
    assert [case.id for case in others] == [case.id for case in CASES]
    mine = next(case for case in CASES if case.op == "norm.rms")
    theirs = next(case for case in others if case.id == mine.id)
    assert not bool((mine.inputs().tensor("x_TD") == theirs.inputs().tensor("x_TD")).all())


def test_a_choice_narrows_by_level_op_and_id() -> None:
    assert {case.op for case in chosen(CASES, ops=["attention.*"])} == {"attention.sparse"}
    assert {case.level for case in chosen(CASES, level=Level.L1)} == {Level.L0, Level.L1}
    assert [case.id for case in chosen(CASES, ids=["L0/-/memory"])] == ["L0/-/memory"]


def test_what_matches_nothing_is_named_with_what_comes_close() -> None:
    with pytest.raises(ArgumentError, match=r"norm\.rms"):
        chosen(CASES, ops=["norm.rsm"])
    with pytest.raises(ArgumentError, match="L0/-/memory"):
        chosen(CASES, ids=["L0/-/memori"])
    with pytest.raises(ArgumentError, match="L7"):
        parse_level("L9")
    with pytest.raises(ArgumentError, match="quick, full"):
        parse_profile("fast")
