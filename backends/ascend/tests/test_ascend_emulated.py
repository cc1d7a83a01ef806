"""The driver on the emulated device: what reaches the runtime, call by call, through the real torch_npu.

These tests need torch-npu (the Ascend lane). They look at calls, copies and streams; results are computed by nobody.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from host_cann import Emulator
from host_cann.records import Copy, Direction

from deepinfer.accelerator.capabilities import Repeatability
from deepinfer.accelerator.interface import LinearShape, OpOptions
from deepinfer.accelerator.plan import make_plan
from deepinfer.accelerator.upload import on_device
from deepinfer.errors import DeterminismError, OpRefusedError
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.request import RequestSampling
from deepinfer.sampling.rows import RowRequest, build_sampling_step
from deepinfer_ascend import Driver
from deepinfer_ascend.call_check.op_trials import TRIALS, Bench
from deepinfer_ascend.call_check.sites import Maker
from deepinfer_ascend.call_check.sizes import SMALL
from deepinfer_ascend.capabilities import NATIVE
from deepinfer_cpu_ref import Driver as Reference

SERVED = OpOptions(activation_dtype=torch.bfloat16, numerics="served")
READS_THE_HOST = ("linear.dense", "linear.grouped", "experts.routed", "experts.shared", "experts.local")
"""Trials that prepare weights, which come from the host."""


def test_the_driver_finds_its_device_and_memory(host_cann_machine: Emulator) -> None:
    found = Driver.availability()
    assert found.available
    assert found.device_name == "Ascend950PR_9599"
    assert "HCCL_DETERMINISTIC=strict" in found.runtime
    driver = Driver()
    assert driver.device == torch.device("npu", 0)
    assert driver.chip.family == "950PR"
    memory = driver.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert driver.allocate((2, 3), torch.uint8).device == driver.device


def test_a_plan_names_every_fallback(host_cann_machine: Emulator) -> None:
    driver = Driver()
    made = make_plan(driver, SERVED, reference=Reference())
    assert set(made.fallbacks) <= set(driver.capabilities().declared_fallbacks)
    assert not set(made.fallbacks) & set(NATIVE)


def test_streams_wait_for_events_and_events_are_done_after_a_wait(host_cann_machine: Emulator) -> None:
    driver = Driver()
    first, second = driver.new_stream(), driver.new_stream()
    event = first.record_event()
    second.wait_event(event)
    late = second.record_event()
    late.wait()
    assert late.done()
    assert event.done()


def test_work_is_issued_on_its_stream_and_its_exception_comes_out_of_the_wait(host_cann_machine: Emulator) -> None:
    driver = Driver()
    stream = driver.new_stream()
    before = torch.npu.current_stream()
    seen: list[object] = []
    mark = stream.enqueue(lambda: seen.append(torch.npu.current_stream()))
    mark.wait()
    assert mark.done()
    assert seen == [stream.raw]
    assert torch.npu.current_stream() == before
    x = driver.allocate((3,), torch.float32)
    assert stream.to_host(x).device.type == "cpu"

    def fail() -> None:
        raise OpRefusedError("no such operator")

    failed = stream.enqueue(fail)
    with pytest.raises(OpRefusedError, match="no such operator"):
        failed.wait()
    assert torch.npu.current_stream() == before


def test_a_graph_records_once_and_replays_what_it_recorded(host_cann_machine: Emulator) -> None:
    driver = Driver()
    x, weight = driver.allocate((2, 64), torch.float32), driver.allocate((64,), torch.float32)
    graph = driver.new_graph()
    with pytest.raises(OpRefusedError, match="not being recorded"):
        graph.capture_end()
    before = torch.npu.current_stream()
    with host_cann_machine.calls_only(), host_cann_machine.record() as recording:
        graph.capture_begin()
        with pytest.raises(OpRefusedError, match="still being recorded"):
            graph.replay()
        torch.ops.npu.npu_rms_norm(x, weight, 1e-6)
        graph.capture_end()
        graph.replay()
        driver.synchronize()
    assert torch.npu.current_stream() == before
    assert recording.operators().count("aclnnRmsNorm") == 2


@pytest.mark.parametrize("op", [op for op in TRIALS if NATIVE[op].graph_safe])
def test_an_op_that_is_safe_for_graphs_never_crosses_to_the_host(host_cann_machine: Emulator, op: str) -> None:
    driver = Driver()
    make = Maker(driver.device)
    bench = Bench(driver.op_groups(SERVED), make, Maker(torch.device("cpu")), SMALL, torch.bfloat16)
    with host_cann_machine.calls_only(), torch.inference_mode():
        if op in READS_THE_HOST:
            TRIALS[op](bench)
            return
        with host_cann_machine.record() as recording:
            TRIALS[op](bench)
    recording.expect_no_host_transfer()


def test_levels_without_proof_are_refused(host_cann_machine: Emulator) -> None:
    with pytest.raises(DeterminismError, match=r"R2 is not proved on this chip for .*linear\.dense"):
        Driver().set_determinism(Repeatability.BATCH_INVARIANT, [LinearShape(64, 32, torch.bfloat16)])


def test_what_a_step_brings_from_the_host_does_not_wait_for_the_device(host_cann_machine: Emulator) -> None:
    driver = Driver()
    settings = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=3, top_p=0.5, min_p=0.1, logprobs=2),
        SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.5, presence_penalty=0.5),
        SamplingParams(allowed_token_ids=[1, 2], blacklist_token_ids=[4]),
    ]
    rows = [
        RowRequest(
            RequestSampling.create(each, seed=1, prompt_token_ids=[5, 6], end_token_ids=[0], vocab_size=64),
            2,
            [],
            np.full(2, -1, np.int32),
        )
        for each in settings
    ]
    values = np.arange(5)
    with host_cann_machine.record() as recording:
        moved = on_device(values, driver.device)
        values[:] = 0  # the host goes on, and may take the memory back
        build_sampling_step(rows, driver.device)
    copies = recording.of(Copy)
    assert len(copies) > len(settings)
    assert all(
        copy.direction is Direction.HOST_TO_DEVICE and copy.is_asynchronous and copy.is_pinned for copy in copies
    )
    assert moved.cpu().tolist() == [0, 1, 2, 3, 4]
