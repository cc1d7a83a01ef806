"""Ops over cache records pass the suite's own cases of L1, and of L2 for both kinds of kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from kernel_drivers import PagedDriver

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


def chosen(case: Case) -> bool:
    """Every case of L1; of L2 one option for each kernel, since dtypes and formats end where a tile is decoded."""
    if case.op not in PagedDriver.claimed_ops() or case.check in CHECKS_OF_THREADS:
        return False
    options = case.options
    exact = options.activation_dtype == torch.float32 and options.numerics == "portable"
    plain = options.kv_cache_dtype == "released" and (exact or options.numerics == "served")
    return case.level is Level.L1 or (case.level is Level.L2 and plain)


CASES = [case for case in catalogue(0, "quick") if chosen(case)]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(PagedDriver(), CpuRef(readable=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_of_the_suite_passes(case: Case, bench: Bench, session: Session) -> None:
    result = attempt(case, bench)
    assert result.outcome in (Outcome.PASS, Outcome.REFUSED), f"{result.outcome}: {result.detail}"
    assert result.how == "interpreted"


def test_both_kernels_of_attention_and_every_op_have_cases_of_l2() -> None:
    found = {(case.op, case.options.numerics) for case in CASES if case.level is Level.L2}
    # The suite lays steps in portable numerics only: blocks of drafts are the served kernel's cases of L2.
    assert {("attention.sparse", "portable"), ("drafting.attend", "portable"), ("drafting.attend", "served")} <= found
    assert ("selection.top_entries", "portable") in found
