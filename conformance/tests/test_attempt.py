"""From claims and findings to outcomes."""

from __future__ import annotations

import dataclasses
import datetime
from types import MappingProxyType

import pytest
import torch

from deepinfer.accelerator import AcceleratorDriver, Capabilities, OpCapability, Repeatability
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.claims import Standing, how, standing
from deepinfer_conformance.drivers import Fault, FaultKind, FaultyDriver
from deepinfer_conformance.mutants.rewiring import RewiredDriver
from deepinfer_conformance.outcomes import Finding, Outcome
from deepinfer_conformance.runner.attempt import attempt
from deepinfer_conformance.waivers import Waiver

CASES = {case.id: case for case in catalogue(0, "quick")}
RMS = CASES["L1/norm.rms/numerics/17_rows/float32"]
RMS_BF16 = CASES["L1/norm.rms/numerics/17_rows/bfloat16"]
RMS_ROWS = CASES["L2/norm.rms/batch_size/17_rows/float32"]
SELECT = CASES["L1/selection.top_entries/numerics/middle/float32"]


def _claiming(reference: AcceleratorDriver, **changes: object) -> RewiredDriver:
    claims = reference.capabilities()
    ops = {op: dataclasses.replace(claim, **changes) for op, claim in claims.ops.items()}  # type: ignore[arg-type]
    changed = dataclasses.replace(claims, ops=ops)
    return RewiredDriver(reference, parts={"capabilities": lambda: changed})


def test_a_claim_that_holds_passes_with_its_metric_and_digest(bench: Bench) -> None:
    result = attempt(RMS, bench)
    assert (result.outcome, result.metric, result.bound) == (Outcome.PASS, "error / bound", 1.0)
    assert result.value is not None
    assert 0 < result.value < 1
    assert result.reference_error == result.value
    assert len(result.input_sha256) == 64


def test_a_wrong_value_fails_and_the_detail_says_where(reference: AcceleratorDriver) -> None:
    driver = FaultyDriver.wrapping(reference, [Fault(op="norm.rms", kind=FaultKind.VALUE, row=3, element=5)])
    result = attempt(RMS, Bench(driver, reference))
    assert result.outcome is Outcome.FAIL
    assert "[3, 5]" in result.detail


def test_what_raises_is_an_error_and_what_has_no_memory_says_so(reference: AcceleratorDriver) -> None:
    for kind, words in ((FaultKind.RAISE, "InjectedFaultError"), (FaultKind.OUT_OF_MEMORY, "out of memory")):
        result = attempt(RMS, Bench(FaultyDriver.wrapping(reference, [Fault(op="norm.rms", kind=kind)]), reference))
        assert result.outcome is Outcome.ERROR
        assert words in result.detail


def test_an_undeclared_dtype_that_is_computed_fails(reference: AcceleratorDriver) -> None:
    result = attempt(RMS_BF16, Bench(_claiming(reference, dtypes=frozenset({torch.float32})), reference))
    assert result.outcome is Outcome.FAIL
    assert "instead of refusing" in result.detail


def test_a_claimed_call_that_is_refused_fails(reference: AcceleratorDriver) -> None:
    claims = reference.capabilities()
    driver = RewiredDriver(reference, parts={"op_groups": lambda _: {}, "capabilities": lambda: claims})
    result = attempt(RMS, Bench(driver, reference))
    assert result.outcome is Outcome.FAIL
    assert "claimed, and refused" in result.detail


@pytest.mark.parametrize(
    ("case", "claim", "wanted"),
    [
        (RMS, OpCapability(), Standing.CLAIMED),
        (RMS_BF16, OpCapability(), Standing.OUTSIDE),
        (RMS_ROWS, OpCapability(repeatability=Repeatability.RUN_TO_RUN), Standing.NOT_CLAIMED),
        (RMS_ROWS, OpCapability(repeatability=Repeatability.BATCH_INVARIANT), Standing.CLAIMED),
        (SELECT, OpCapability(largest=MappingProxyType({"top_k": 5})), Standing.OUTSIDE),
        (SELECT, OpCapability(largest=MappingProxyType({"top_k": 6})), Standing.CLAIMED),
        (RMS, None, Standing.NOT_CLAIMED),
    ],
)
def test_standing_follows_from_the_claims(case: Case, claim: OpCapability | None, wanted: Standing) -> None:
    ops = {case.op: claim} if claim is not None else {}
    assert standing(case, Capabilities(ops=ops)).standing is wanted


def test_a_declared_fallback_is_told_from_an_op_that_is_missing() -> None:
    assert "fallback" in standing(RMS, Capabilities(ops={}, declared_fallbacks=("norm.rms",))).why
    assert "does not offer" in standing(RMS, Capabilities(ops={})).why


def test_an_interpreted_provider_is_no_run_on_the_device() -> None:
    assert how(RMS, Capabilities(ops={"norm.rms": OpCapability(provider="interpreted triton")})) == "interpreted"
    assert how(RMS, Capabilities(ops={"norm.rms": OpCapability()})) == "device"


def test_a_waiver_turns_a_failure_of_its_case_alone(reference: AcceleratorDriver) -> None:
    driver = FaultyDriver.wrapping(reference, [Fault(op="norm.rms", kind=FaultKind.VALUE)])
    waiver = Waiver("faulty", "*", "*", RMS.id, "firmware 7", "https://example.test/1", datetime.date(2099, 1, 1))
    bench = Bench(driver, reference)
    result = attempt(RMS, bench, [waiver])
    assert result.outcome is Outcome.WAIVED
    assert "firmware 7" in result.detail
    assert attempt(RMS_BF16, bench, [waiver]).outcome is Outcome.FAIL


def test_a_finding_of_nan_does_not_hold() -> None:
    assert not Finding("x", float("nan"), 1.0).holds
    assert Finding("x", 0.5, 1.0).share == 0.5
    assert Finding("x", 1.0, 0.0).share == float("inf")
