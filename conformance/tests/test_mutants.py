"""No check is blind: each passes on the reference and catches its mutant."""

from __future__ import annotations

import pytest

from deepinfer.accelerator import AcceleratorDriver
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.mutants import MUTANTS
from deepinfer_conformance.outcomes import Level, Outcome
from deepinfer_conformance.runner.attempt import attempt

CAUGHT = (Outcome.FAIL, Outcome.ERROR)


def _one_case_a_check_and_op() -> list[Case]:
    """The walk takes the first case of each op that has something to strike; ranks three at a time."""
    chosen: dict[tuple[str, str], Case] = {}
    for case in catalogue(0, "quick"):
        if case.level is Level.L3 and case.facts["ranks"] != 3:
            continue
        dull = any(word in case.id for word in ("/0_", "_0_rows", "no_rows", "no_slots", "nothing", "over_nan"))
        key = (f"{case.level.name}/{case.check}", case.op)
        if not dull or case.check == "refusal":
            chosen.setdefault(key, case)
    return list(chosen.values())


@pytest.mark.parametrize("case", _one_case_a_check_and_op(), ids=lambda case: case.id)
def test_the_mutant_is_caught_and_the_original_is_not(case: Case, reference: AcceleratorDriver) -> None:
    mutant = MUTANTS[f"{case.level.name}/{case.check}"]
    host = mutant.host() if mutant.host is not None else reference
    drivers = mutant.make(Bench(host, reference), case)
    assert drivers, f"nothing to strike in {case.id}"
    for driver in drivers:
        result = attempt(case, Bench(driver, reference))
        assert result.outcome in CAUGHT, f"blind to: {mutant.says}; {result}"
    if case.level < Level.L2:  # the others are shown to pass by the run of the suite itself
        assert attempt(case, Bench(host, reference)).outcome in (Outcome.PASS, Outcome.REFUSED)


def test_every_check_is_walked() -> None:
    walked = {f"{case.level.name}/{case.check}" for case in _one_case_a_check_and_op()}
    assert walked == set(MUTANTS)
