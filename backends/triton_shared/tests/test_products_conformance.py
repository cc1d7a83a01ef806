"""Products, experts and sampling pass the suite's own cases: values on every input of L1, laws on a check's first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from kernel_drivers import ProductsDriver

from deepinfer.accelerator import OP_GROUPS
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.outcomes import Level, Outcome
from deepinfer_conformance.runner.attempt import attempt
from deepinfer_cpu_ref import Driver as CpuRef

if TYPE_CHECKING:
    from deepinfer_conformance.triton_cpu import Session

CHECKS_OF_THREADS = ("threads", "step_threads", "repetition")
"""The interpreter has one thread and no chance: these laws cannot fail in it, and are left to the whole suite."""

LAWS_IN = {"linear.dense": (torch.float32, torch.bfloat16)}
"""Where laws are run in both dtypes; elsewhere the second one takes the same way through the kernel."""


def chosen_cases() -> list[Case]:
    """Return every numerics case of L1, and the first inputs of each other check, served and unserved."""
    seen: set[tuple[object, ...]] = set()
    found = []
    claimed = ProductsDriver.claimed_ops()
    for case in catalogue(0, "quick"):
        if case.op not in claimed or case.level not in (Level.L1, Level.L2) or case.check in CHECKS_OF_THREADS:
            continue
        if case.op in ("experts.route", "experts.combine"):  # with the row-wise ops
            continue
        if case.check != "numerics":
            kind = (case.op, case.check, case.options)
            served = case.options.numerics == "served"
            if kind in seen or not (served or case.options.activation_dtype in LAWS_IN.get(case.op, (torch.float32,))):
                continue
            seen.add(kind)
        found.append(case)
    return found


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(ProductsDriver(), CpuRef(readable=True))


@pytest.mark.parametrize("case", chosen_cases(), ids=lambda case: case.id)
def test_case_of_the_suite_passes(case: Case, bench: Bench, session: Session) -> None:
    result = attempt(case, bench)
    assert result.outcome in (Outcome.PASS, Outcome.REFUSED), f"{result.outcome}: {result.detail}"
    assert result.how == "interpreted"


def test_groups_are_complete() -> None:
    served = set(ProductsDriver.claimed_ops())
    whole = ("linear", "experts", "sampling")
    assert {
        f"{group.group}.{name}" for group in OP_GROUPS if group.group in whole for name in group.op_names()
    } == served
