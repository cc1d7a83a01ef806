"""Every op that has kernels passes the suite's own cases of L1, and of L2 for its representative inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from kernel_drivers import RowsDriver

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

TWO_DTYPES = ("norm.rms", "mixing.mixes", "experts.route", "memory.gate")
"""Ops with sums, whose L2 is run in both dtypes; the others' kernels widen what they load, and are the same then."""


def chosen(case: Case) -> bool:
    if case.op not in RowsDriver.claimed_ops() or case.check in CHECKS_OF_THREADS:
        return False
    plain = case.options.activation_dtype == torch.float32 and case.options.kv_cache_dtype == "released"
    return case.level is Level.L1 or (case.level is Level.L2 and (plain or case.op in TWO_DTYPES))


def first_of_each() -> list[Case]:
    """Return every case of L1, and of L2 the first inputs that a check has; the whole suite runs the others."""
    seen: set[tuple[object, ...]] = set()
    found = []
    for case in catalogue(0, "quick"):
        kind = (case.op, case.check, case.options)
        if chosen(case) and (case.level is Level.L1 or kind not in seen):
            seen.add(kind)
            found.append(case)
    return found


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(RowsDriver(), CpuRef(readable=True))


@pytest.mark.parametrize("case", first_of_each(), ids=lambda case: case.id)
def test_case_of_the_suite_passes(case: Case, bench: Bench, session: Session) -> None:
    result = attempt(case, bench)
    assert result.outcome in (Outcome.PASS, Outcome.REFUSED), f"{result.outcome}: {result.detail}"
    assert result.how == "interpreted"


def test_row_wise_groups_are_complete() -> None:
    served = set(RowsDriver.claimed_ops())
    whole = ("norm", "codec", "compression", "mixing", "memory", "plumbing", "moves")
    wanted = {f"{group.group}.{name}" for group in OP_GROUPS if group.group in whole for name in group.op_names()}
    assert wanted | {"experts.route", "experts.combine"} == served
