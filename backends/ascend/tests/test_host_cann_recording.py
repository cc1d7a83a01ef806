"""Everything that is asked of the device is on record: operators with their arguments, copies, events, streams."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from host_cann import Emulator, HostCannError, ScalarArgument
from host_cann.records import Copy, Direction, EventRecord, EventWait, OperatorCall, Phase


def test_a_call_is_recorded_with_shapes_strides_types_and_scalars(host_cann_machine: Emulator) -> None:
    x = torch.ones(4, 6).npu()
    with host_cann_machine.record() as recording:
        torch.sub(x.t(), x.t(), alpha=3)
    call = recording.only("aclnnSub")
    source = call.tensor("self")
    assert (source.shape, source.strides, source.offset, source.dtype, source.format) == (
        (6, 4),
        (1, 6),
        0,
        "float32",
        "ND",
    )
    assert source.storage_shape == (24,)
    assert source.address == x.data_ptr()
    assert call["alpha"] == ScalarArgument(3, "int64")
    assert (call.phase, call.device, call.has_kernel) == (Phase.EXECUTED, 0, True)


def test_a_slice_is_recorded_with_its_offset(host_cann_machine: Emulator) -> None:
    x = torch.ones(4, 6, dtype=torch.bfloat16).npu()
    with host_cann_machine.record() as recording:
        x[1:, 2:].neg()
    source = recording.only("aclnnNeg").tensor("self")
    assert (source.shape, source.strides, source.dtype) == ((3, 4), (6, 1), "bfloat16")
    assert source.address + source.offset * 2 == x.data_ptr() + (6 + 2) * 2


def test_records_cannot_be_changed(host_cann_machine: Emulator) -> None:
    with host_cann_machine.record() as recording:
        torch.zeros(3, device="npu:0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recording.only("aclnnInplaceZero").operator = "other"  # type: ignore[misc]


def test_copies_are_recorded_with_direction_size_and_pinning(host_cann_machine: Emulator) -> None:
    pinned, pageable = torch.ones(16).pin_memory(), torch.ones(8)
    with host_cann_machine.record() as recording:
        x = pinned.to("npu:0", non_blocking=True)
        y = pageable.to("npu:0")
        x.cpu()
    assert [(copy.direction, copy.nbytes, copy.is_asynchronous, copy.is_pinned) for copy in recording.of(Copy)] == [
        (Direction.HOST_TO_DEVICE, 64, True, True),
        (Direction.HOST_TO_DEVICE, 32, False, False),
        (Direction.DEVICE_TO_HOST, 64, False, False),
    ]
    assert recording.of(Copy)[1].destination == y.data_ptr()


def test_streams_and_events_are_recorded_and_their_order_can_be_checked(host_cann_machine: Emulator) -> None:
    x, side = torch.ones(4).npu(), torch.npu.Stream()
    main = torch.npu.current_stream()
    with host_cann_machine.record() as recording:
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x + 1
        main.wait_stream(side)
        y.neg()
    on_side, on_main = recording.of(OperatorCall)
    assert on_side.stream != on_main.stream
    assert [event.stream for event in recording.of(EventRecord)] == [on_main.stream, on_side.stream]
    assert [event.stream for event in recording.of(EventWait)] == [on_side.stream, on_main.stream]
    recording.expect_ordered(on_side.stream, on_main.stream)


def test_a_missing_wait_between_streams_is_found(host_cann_machine: Emulator) -> None:
    x, side = torch.ones(4).npu(), torch.npu.Stream()
    with host_cann_machine.record() as recording:
        with torch.npu.stream(side):
            y = x + 1
        y.neg()
    on_side, on_main = recording.of(OperatorCall)
    with pytest.raises(HostCannError, match="waits for no event"):
        recording.expect_ordered(on_side.stream, on_main.stream)


def test_a_hidden_read_by_the_host_is_found(host_cann_machine: Emulator) -> None:
    x = torch.ones(4).npu()
    with host_cann_machine.record() as quiet:
        x.add_(1)
    quiet.expect_no_host_transfer()
    with host_cann_machine.record() as recording:
        x[x > 0] = 2.0  # torch_npu reads the scalar back
    with pytest.raises(HostCannError, match="were to be independent"):
        recording.expect_no_host_transfer()


def test_the_wrong_sequence_of_operators_is_reported_with_both(host_cann_machine: Emulator) -> None:
    with host_cann_machine.record() as recording:
        torch.ones(3, device="npu:0").exp()
    recording.expect_operators("aclnnInplaceOne", "aclnnExp")
    with pytest.raises(HostCannError, match=r"got \['aclnnInplaceOne', 'aclnnExp'\], expected \['aclnnExp'\]"):
        recording.expect_operators("aclnnExp")
    with pytest.raises(HostCannError, match="0 calls of aclnnLog"):
        recording.only("aclnnLog")


def test_recordings_nest(host_cann_machine: Emulator) -> None:
    with host_cann_machine.record() as outer:
        torch.zeros(3, device="npu:0")
        with host_cann_machine.record() as inner:
            torch.ones(3, device="npu:0")
    assert inner.operators() == ("aclnnInplaceOne",)
    assert outer.operators() == ("aclnnInplaceZero", "aclnnInplaceOne")


def test_calls_can_be_checked_without_computing(host_cann_machine: Emulator) -> None:
    x = torch.ones(2, 4, 8).npu()
    with host_cann_machine.record() as recording, host_cann_machine.calls_only():
        result = torch.ops.npu.npu_fused_infer_attention_score_v2(
            x.bfloat16(), x.bfloat16(), x.bfloat16(), num_query_heads=1, softmax_scale=0.5, input_layout="BSH"
        )
    call = recording.of(OperatorCall)[-1]
    assert call.operator.startswith("aclnnFusedInferAttentionScore")
    assert not call.has_kernel
    assert [tensor.shape for tensor in call.tensors][:1] == [(2, 4, 8)]
    assert result[0].shape == (2, 4, 8)
    with pytest.raises(RuntimeError, match="has no host kernel"):
        torch.ops.npu.npu_fused_infer_attention_score_v2(
            x.bfloat16(), x.bfloat16(), x.bfloat16(), num_query_heads=1, softmax_scale=0.5, input_layout="BSH"
        )
