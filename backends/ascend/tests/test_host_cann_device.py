"""Each strictness of the emulated device, with a planted fault that it must name."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import host_cann
import pytest
import torch
from host_cann import Emulator, HostCannError
from host_cann.descriptors import TensorArgument
from host_cann.prototypes import parse

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3


def copied(machine: Emulator, to: int, room: int, source: int, nbytes: int, kind: int) -> str:
    """Return why the runtime refuses a copy; "" if it does not."""
    call = machine.library.aclrtMemcpy
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    code = call(to, room, source, nbytes, kind)
    reason = machine.reason()
    assert bool(code) == bool(reason)
    return reason


def allocated(machine: Emulator, nbytes: int) -> int:
    address = ctypes.c_void_p()
    assert machine.library.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes), 0) == 0
    assert address.value is not None
    return address.value


def freed(machine: Emulator, address: int) -> str:
    machine.library.aclrtFree(ctypes.c_void_p(address))
    return machine.reason()


def test_the_device_is_the_one_that_was_asked_for(host_cann_machine: Emulator) -> None:
    properties = torch.npu.get_device_properties(0)
    assert (torch.npu.device_count(), torch.npu.get_device_name(0)) == (1, "Ascend950PR_9599")
    assert (properties.cube_core_num, properties.vector_core_num) == (36, 72)
    assert torch.npu.get_soc_version() == 260


def test_bytes_survive_the_way_to_the_device_and_back(host_cann_machine: Emulator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn):
        x = torch.randint(0, 2, (5, 7)).to(dtype)
        assert torch.equal(x.npu().cpu().view(torch.uint8), x.view(torch.uint8))


def test_an_operator_without_a_kernel_is_an_error_that_names_it(host_cann_machine: Emulator) -> None:
    x = torch.ones(3).npu()
    with host_cann_machine.without_kernel("aclnnExp"), pytest.raises(RuntimeError, match="aclnnExp has no host kernel"):
        torch.exp(x)
    assert torch.exp(x).cpu()[0] > 2


def test_a_prototype_of_another_shape_is_an_error(host_cann_machine: Emulator) -> None:
    x = torch.ones(3).npu()
    with (
        host_cann_machine.kernel("aclnnExp(self, int extra, out*)", lambda **_: None),
        pytest.raises(RuntimeError, match="parameter 'out' is"),
    ):
        torch.exp(x)
    with (
        host_cann_machine.kernel("aclnnExp(self)", lambda **_: None),
        pytest.raises(RuntimeError, match="other arguments than its prototype names"),
    ):
        torch.exp(x)


def test_a_result_of_another_size_than_allotted_is_an_error(host_cann_machine: Emulator) -> None:
    def wrong(self: torch.Tensor, out: torch.Tensor) -> None:
        host_cann.views.store(out, self[:2])

    with (
        host_cann_machine.kernel("aclnnExp(self, out*)", wrong),
        pytest.raises(RuntimeError, match=r"computes \(2,\), but \(3,\)"),
    ):
        torch.exp(torch.ones(3).npu())


def test_an_index_outside_of_its_dimension_is_an_error(host_cann_machine: Emulator) -> None:
    with pytest.raises(RuntimeError, match=r"index 0\.\.9 leaves a dimension of 4"):
        torch.zeros(4).npu().index_select(0, torch.tensor([0, 9]).npu())


def test_a_mixed_device_call_is_refused_by_torch_npu_itself(host_cann_machine: Emulator) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ops.npu.npu_rms_norm(torch.ones(2, 8).npu(), torch.ones(8), 1e-6)


def test_fresh_memory_is_not_zero(host_cann_machine: Emulator) -> None:
    address = allocated(host_cann_machine, 64)
    host = ctypes.create_string_buffer(64)
    assert copied(host_cann_machine, ctypes.addressof(host), 64, address, 64, DEVICE_TO_HOST) == ""
    assert host.raw == b"\xff" * 64
    assert freed(host_cann_machine, address) == ""


def test_a_copy_in_the_wrong_direction_is_an_error(host_cann_machine: Emulator) -> None:
    device, host = allocated(host_cann_machine, 64), ctypes.addressof(ctypes.create_string_buffer(64))
    assert "is host memory" in copied(host_cann_machine, device, 64, host, 64, DEVICE_TO_DEVICE)
    assert "is host memory" in copied(host_cann_machine, host, 64, device, 64, HOST_TO_DEVICE)
    assert "the destination" in copied(host_cann_machine, device, 64, device, 64, DEVICE_TO_HOST)
    assert "kind 9" in copied(host_cann_machine, device, 64, host, 64, 9)


def test_a_copy_past_the_end_is_an_error(host_cann_machine: Emulator) -> None:
    device, host = allocated(host_cann_machine, 64), ctypes.addressof(ctypes.create_string_buffer(128))
    assert "end past an allocation of 64 bytes" in copied(host_cann_machine, device + 8, 128, host, 60, HOST_TO_DEVICE)
    assert "room for 32" in copied(host_cann_machine, device, 32, host, 64, HOST_TO_DEVICE)


def test_freed_memory_is_never_valid_again(host_cann_machine: Emulator) -> None:
    device, host = allocated(host_cann_machine, 64), ctypes.addressof(ctypes.create_string_buffer(64))
    assert freed(host_cann_machine, device) == ""
    assert "freed device memory" in copied(host_cann_machine, device, 64, host, 64, HOST_TO_DEVICE)
    assert "second time" in freed(host_cann_machine, device)
    assert "did not return" in freed(host_cann_machine, device + 8)
    assert allocated(host_cann_machine, 64) != device


def test_a_function_without_an_emulation_is_an_error_that_names_it(host_cann_machine: Emulator) -> None:
    with host_cann_machine.record() as recording:
        assert host_cann_machine.library.aclrtCmoAsync(None, 0, 0, None) != 0
    assert host_cann_machine.reason() == "host CANN: aclrtCmoAsync is not emulated"
    assert [refused.function for refused in recording.of(host_cann.records.Refused)] == ["aclrtCmoAsync"]


def test_no_descriptor_outlives_its_call(host_cann_machine: Emulator) -> None:
    count = host_cann_machine.library.host_cann_live_descriptors
    count.restype = ctypes.c_int64
    x = torch.ones(3, 4).npu()
    before = count()
    torch.cat([x, x + 1]).sum(-1).clamp(0, 1)[torch.tensor([0, 1]).npu()].cpu()
    assert count() == before


def test_kernels_compute_although_a_mode_wants_all_tensors_on_the_device(host_cann_machine: Emulator) -> None:
    with torch.device("npu:0"):
        assert torch.arange(4).unique().cpu().tolist() == [0, 1, 2, 3]


def test_a_prototype_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(HostCannError, match="no prototype"):
        parse("aclnnExp self, out")
    with pytest.raises(HostCannError, match="'tensor x' in"):
        parse("aclnnExp(tensor x)")


def test_an_unknown_chip_is_refused_with_the_known_ones(host_cann_machine: Emulator) -> None:
    with pytest.raises(HostCannError, match="Ascend950DT_9591"):
        host_cann.load("Ascend310")


def test_one_process_has_one_machine(host_cann_machine: Emulator) -> None:
    assert host_cann.load("Ascend950PR_9599", 1) is host_cann_machine
    with pytest.raises(HostCannError, match="start another"):
        host_cann.load("Ascend950DT_9591", 1)


@pytest.mark.parametrize(
    ("soc", "name", "version"),
    [
        ("Ascend950DT_9591", "Ascend950DT_9591", 260),
        ("Ascend910B", "Ascend910B3", 223),
        ("Ascend910_93", "Ascend910_9391", 250),
    ],
)
def test_other_chips_load_and_compute(host_cann_machine: Emulator, soc: str, name: str, version: int) -> None:
    code = (
        f"import host_cann; host_cann.load({soc!r}, 2); import torch; torch.npu.set_device(1); x = torch.ones(3).npu();"
        "print(torch.npu.get_device_name(1), torch.npu.get_soc_version(), torch.npu.device_count(), "
        "(x + x).sum().item())"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout.splitlines()[-1:] == [f"{name} {version} 2 6.0"], done.stderr


def test_a_tensor_argument_knows_whether_it_is_contiguous() -> None:
    plain = TensorArgument((2, 3), (3, 1), 0, "float32", "ND", (6,), 0, 0)
    turned = TensorArgument((3, 2), (1, 3), 0, "float32", "ND", (6,), 0, 0)
    assert plain.is_contiguous
    assert not turned.is_contiguous
