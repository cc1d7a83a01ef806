"""The small model on the emulated device through this driver, held against `cpu_ref` by the suite's L5.

What it proves is our wiring and layouts as we read the documentation of the operators, whose kernels here are ours:
real torch_npu, every native op through it, declared fallbacks by name. It proves nothing about the vendor's kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from host_cann import Emulator

from deepinfer_ascend import Driver
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.end_to_end.engines import make_engine
from deepinfer_conformance.outcomes import Level, Outcome
from deepinfer_conformance.runner.attempt import attempt
from deepinfer_cpu_ref import Driver as Reference

CASES = [
    case
    for case in catalogue(0, "quick")
    if case.level is Level.L5
    and case.check != "tokens"
    and (case.check != "skills" or case.options.numerics == "served")
]
"""Best tokens and logits under forced continuation, cache records, and what the model can do, in its served form.

Free-running tokens are asserted nowhere but as answers.
"""
NATIVE_OPERATORS = frozenset(
    {
        "aclnnDynamicMxQuantV3",
        "aclnnMhcPost",
        "aclnnMhcPreV2",
        "aclnnMhcSinkhorn",
        "aclnnMoeGatingTopK",
        "aclnnQuantMatmulV5",
        "aclnnRmsNorm",
        "aclnnRotaryPositionEmbeddingV2",
    }
)
"""What the served model cannot do without."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu warns of operators that fall back to the CPU
        yield


@pytest.mark.timeout(900)  # up to a minute of one core that has nothing else to do
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_small_model_agrees_with_the_reference(host_cann_machine: Emulator, case: Case) -> None:
    bench = Bench(Driver(), Reference(readable=True))
    with host_cann_machine.record() as recording:
        result = attempt(case, bench)
    assert result.outcome is Outcome.PASS, result
    called = frozenset(recording.operators())
    if case.options.numerics == "served":
        assert called >= NATIVE_OPERATORS
        assert called & {"aclnnGroupedMatmulV4", "aclnnGroupedMatmulV5"}  # torch_npu's choice
    assert "aclnnRmsNorm" in called


def test_the_engine_names_what_falls_back_and_what_order_depends_on(host_cann_machine: Emulator) -> None:
    plan = make_engine(Driver(), CASES[0].options).plan
    assert set(plan.fallbacks) <= set(Driver().capabilities().declared_fallbacks)
    assert {"attention.sparse", "sampling.sample"} <= set(plan.fallbacks)
    assert plan.runtime_variables["HCCL_DETERMINISTIC"] == "strict"
