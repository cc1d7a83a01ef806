"""The small model on the emulated device with the driver's Triton kernels, interpreted on host copies."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator

import pytest
import torch
from host_cann import Emulator

from deepinfer.accelerator import OpOptions
from deepinfer_conformance.end_to_end.engines import answers, make_engine
from deepinfer_cpu_ref import Driver as Reference

OPTIONS = OpOptions(activation_dtype=torch.float32, kv_cache_dtype="released")
PROMPT, NEW_TOKENS = (1, 5, 9, 2, 7), 2
KERNEL_GROUPS = ("codec", "compression", "attention", "drafting")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch_npu") is None,
    reason="torch-npu 2.13 and triton 3.9 are not installed together: run these tests in the overlay (.ci/run)",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_npu warns of operators that fall back to the CPU
        yield


@pytest.mark.timeout(900)  # an interpreter takes its time
def test_the_small_model_answers_as_the_reference_and_the_plan_names_the_kernels(host_cann_machine: Emulator) -> None:
    from interpreted_kernels import PROVIDER, InterpretedKernels

    from deepinfer_conformance import triton_cpu

    expected = answers(make_engine(Reference(readable=True), OPTIONS), [PROMPT], NEW_TOKENS)
    engine = make_engine(InterpretedKernels(), OPTIONS)
    interpreted = {row.op for row in engine.plan.rows if row.provider == PROVIDER}
    assert {op.partition(".")[0] for op in interpreted} == set(KERNEL_GROUPS)
    assert not interpreted & set(engine.plan.fallbacks)
    with triton_cpu.interpreted() as session:
        assert answers(engine, [PROMPT], NEW_TOKENS) == expected
    launched = {launch.kernel for launch in session.launches}
    assert {"exact_attention_kernel"} <= launched, launched


def test_what_is_not_taken_is_what_the_chosen_class_leaves_out() -> None:
    from deepinfer_ascend.providers import NOT_TAKEN
    from deepinfer_triton.drafting import TritonDraftAttention, TritonDraftingOps

    left_out = set(TritonDraftingOps.implemented()) - set(TritonDraftAttention.implemented())
    assert {f"drafting.{name}" for name in left_out} == NOT_TAKEN
