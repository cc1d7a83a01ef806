"""The reference ops, which know nothing of devices, run on the emulated npu:0 and pass the suite's numerics there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from host_cann import Emulator

from deepinfer.accelerator import OpOptions
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.end_to_end.engines import answers, make_engine
from deepinfer_conformance.outcomes import Level, Outcome
from deepinfer_conformance.runner.attempt import attempt
from deepinfer_cpu_ref import Driver

NEEDS_FLOAT64 = frozenset(
    {
        "drafting.propose",
        "sampling.log_probabilities",
        "sampling.raw_log_probabilities",
        "sampling.uniforms",
        "sampling.weigh",
    }
)
"""torch_npu turns float64 into float32, so that these cannot hold their bounds on the device."""
PROMPT, NEW_TOKENS = (1, 5, 9), 2


class ReferenceOnDevice(Driver):
    """The reference with its tensors on the device."""

    def __init__(self) -> None:
        super().__init__(readable=True)

    @property
    def device(self) -> torch.device:
        return torch.device("npu", 0)


def one_case_of_each_op() -> list[Case]:
    chosen: dict[tuple[str, torch.dtype], Case] = {}
    for case in catalogue(0, "quick"):
        key = (case.op, case.options.activation_dtype)
        is_wanted = case.level is Level.L1 and case.check == "numerics" and case.options.numerics == "portable"
        if is_wanted and key[1] in (torch.float32, torch.bfloat16):
            chosen.setdefault(key, case)
    return list(chosen.values())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu warns of operators that fall back to the CPU
        yield


@pytest.fixture(scope="module")
def bench(host_cann_machine: Emulator) -> Bench:
    return Bench(ReferenceOnDevice(), Driver(readable=True))


@pytest.mark.parametrize("case", one_case_of_each_op(), ids=lambda case: case.id)
def test_reference_ops_hold_their_bounds_on_the_device(bench: Bench, case: Case) -> None:
    result = attempt(case, bench)
    if case.op in NEEDS_FLOAT64:
        assert result.outcome is Outcome.FAIL, result
    else:
        assert result.outcome is Outcome.PASS, result


def test_float64_is_float32_on_the_device(host_cann_machine: Emulator) -> None:
    assert torch.ones(2, dtype=torch.float32).npu().double().dtype == torch.float32


def test_a_shift_of_broadcast_operands_is_refused(host_cann_machine: Emulator) -> None:
    # torch_npu allots the result of `>>` in the shape of the left operand: a real device would be asked the same.
    with pytest.raises(
        RuntimeError, match=r"aclnnRightShift the operator computes \(3, 4\), but \(3, 1\) was allotted"
    ):
        torch.ones(3, 1, dtype=torch.int32).npu() >> torch.arange(4, dtype=torch.int32).npu()


def test_the_small_model_answers_on_the_device_as_on_the_cpu(host_cann_machine: Emulator) -> None:
    options = OpOptions(activation_dtype=torch.float32)
    expected = answers(make_engine(Driver(readable=True), options), [PROMPT], NEW_TOKENS)
    with host_cann_machine.record() as recording:
        given = answers(make_engine(ReferenceOnDevice(), options), [PROMPT], NEW_TOKENS)
    assert given == expected
    assert len(recording.operators()) > 1000
