"""One element outside is an error that says where; what is masked off, or inside, is none."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer_conformance import triton_cpu
from deepinfer_conformance.triton_cpu import OutOfBoundsError


@triton.jit
def access_kernel(x, o, first, count, HOW: tl.constexpr, N: tl.constexpr):
    i = first + tl.program_id(0) * N + tl.arange(0, N)
    inside = i < count
    if HOW == "load":
        tl.store(o + tl.arange(0, N), tl.load(x + i, mask=inside, other=0.0))
    elif HOW == "load without mask":
        tl.store(o + tl.arange(0, N), tl.load(x + i))
    elif HOW == "store":
        tl.store(x + i, tl.load(o + tl.arange(0, N)), mask=inside)
    elif HOW == "atomic fadd":
        tl.atomic_add(x + i, 1.0, mask=inside)
    elif HOW == "atomic_cas":
        tl.atomic_cas(x.to(tl.pointer_type(tl.int32)) + first, 0, 1)
    elif HOW == "loop":
        pointers = x + tl.arange(0, N)
        for _ in range(0, count, N):
            tl.store(o + tl.arange(0, N), tl.load(pointers))
            pointers += N
    elif HOW == "where":
        pointers = tl.where(tl.arange(0, N) < N, x + i, x)
        tl.store(o + tl.arange(0, N), tl.load(tl.trans(pointers[:, None])).reshape([N]))


@triton.jit
def pair_kernel(pair, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(pair[0] + i) + tl.load(pair[1] + i))


@triton.jit
def table_kernel(table, o, N: tl.constexpr):
    pointer = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(o + tl.arange(0, N), tl.load(pointer + tl.arange(0, N)))


@triton.jit
def descriptor_kernel(source, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, source.load([0]))


@triton.jit
def made_descriptor_kernel(x, o, count, N: tl.constexpr):
    target = tl.make_tensor_descriptor(o, [count], [1], [N])
    target.store([0], tl.load(x + tl.arange(0, N)))


def run(how: str, *, first: int, count: int, programs: int = 1, size: int = 32) -> None:
    triton_cpu.launch(access_kernel, (programs,), torch.zeros(size), torch.zeros(16), first, count, HOW=how, N=16)


@pytest.mark.parametrize("how", ["load", "store", "atomic fadd"])
def test_one_element_behind_the_end_is_found(how: str) -> None:
    run(how, first=16, count=32)
    with pytest.raises(OutOfBoundsError) as caught:
        run(how, first=17, count=33)
    error = caught.value
    assert (error.kernel, error.operand, error.access) == ("access_kernel", "x", how)
    assert (error.offset_bytes, error.extent_bytes) == (128, (0, 128))


def test_the_message_names_kernel_program_operand_offset_and_extent() -> None:
    with pytest.raises(OutOfBoundsError) as caught:
        run("load without mask", first=8, count=0, programs=2)
    assert caught.value.program_id == (1, 0, 0)
    message = str(caught.value)
    for part in ("'access_kernel'", "(1, 0, 0)", "load", "'x' at element 32", "byte offset 128", "[0, 128)", "8 of 16"):
        assert part in message, message


def test_one_element_before_the_start_is_found() -> None:
    with pytest.raises(OutOfBoundsError, match="element -1 "):
        run("load", first=-1, count=32)


def test_a_pointer_that_moves_in_a_loop_is_followed() -> None:
    run("loop", first=0, count=32)
    with pytest.raises(OutOfBoundsError, match="'x' at element 32"):
        run("loop", first=0, count=33)


def test_a_selected_and_reshaped_pointer_keeps_its_operand() -> None:
    run("where", first=16, count=0)
    with pytest.raises(OutOfBoundsError, match="'x' at element 32"):
        run("where", first=17, count=0)


def test_compare_and_swap_is_checked() -> None:
    run("atomic_cas", first=31, count=0)
    with pytest.raises(OutOfBoundsError, match="atomic_cas out of bounds: operand 'x' at element 32"):
        run("atomic_cas", first=32, count=0)


def test_masked_lanes_do_not_count() -> None:
    run("load", first=2**20, count=0)
    run("store", first=-(2**20), count=-(2**21))


def test_memory_of_another_argument_is_out_of_bounds() -> None:
    x, o = torch.zeros(32), torch.zeros(16)
    between = (o.data_ptr() - x.data_ptr()) // 4
    with pytest.raises(OutOfBoundsError) as caught:
        triton_cpu.launch(access_kernel, (1,), x, o, between, 0, HOW="load without mask", N=16)
    assert caught.value.operand == "x"


def test_a_view_reaches_its_storage_or_only_itself() -> None:
    storage, o = torch.arange(64.0), torch.zeros(16)
    view = storage[16:32]
    triton_cpu.launch(access_kernel, (1,), view, o, -16, 0, HOW="load without mask", N=16)
    assert o.tolist() == storage[:16].tolist()
    with pytest.raises(OutOfBoundsError, match=r"'x' at element 48 .*\[-64, 192\)"):
        triton_cpu.launch(access_kernel, (1,), view, o, 33, 0, HOW="load without mask", N=16)
    with triton_cpu.interpreted(bounds="view"):
        access_kernel[(1,)](view, o, 0, 0, HOW="load without mask", N=16)
        with pytest.raises(OutOfBoundsError, match=r"'x' at element 16 .*\[0, 64\)"):
            access_kernel[(1,)](view, o, 1, 0, HOW="load without mask", N=16)


def test_a_strided_view_ends_at_its_last_element() -> None:
    view, o = torch.zeros(4, 8)[:, :2], torch.zeros(16)
    with triton_cpu.interpreted(bounds="view"):
        access_kernel[(1,)](view, o, 10, 0, HOW="load without mask", N=16)
        with pytest.raises(OutOfBoundsError, match="element 26"):
            access_kernel[(1,)](view, o, 11, 0, HOW="load without mask", N=16)


def test_tensors_in_a_tuple_are_operands() -> None:
    o = torch.zeros(16)
    triton_cpu.launch(pair_kernel, (1,), (torch.ones(16), torch.ones(16)), o, N=16)
    assert o.tolist() == [2.0] * 16
    with pytest.raises(OutOfBoundsError, match=r"operand 'pair\[1\]' at element 15"):
        triton_cpu.launch(pair_kernel, (1,), (torch.ones(16), torch.ones(15)), o, N=16)


def test_a_pointer_from_memory_must_lie_in_some_argument() -> None:
    x, o = torch.arange(16.0), torch.zeros(16)
    stranger = torch.zeros(16)
    triton_cpu.launch(table_kernel, (1,), torch.tensor([o.data_ptr()]), o, N=16)
    with pytest.raises(OutOfBoundsError, match="comes from no argument"):
        triton_cpu.launch(table_kernel, (1,), torch.tensor([stranger.data_ptr()]), x, N=16)


def test_a_host_descriptor_larger_than_its_tensor_is_found() -> None:
    x, o = torch.zeros(12), torch.zeros(16)
    triton_cpu.launch(descriptor_kernel, (1,), TensorDescriptor(x, [12], [1], [16]), o, N=16)
    with pytest.raises(OutOfBoundsError, match=r"'source.base' at element 12"):
        triton_cpu.launch(descriptor_kernel, (1,), TensorDescriptor(x, [13], [1], [16]), o, N=16)


def test_a_descriptor_made_in_the_kernel_is_checked() -> None:
    x, o = torch.ones(16), torch.zeros(12)
    triton_cpu.launch(made_descriptor_kernel, (1,), x, o, 12, N=16)
    assert o.tolist() == [1.0] * 12
    with pytest.raises(OutOfBoundsError, match="store out of bounds: operand 'o' at element 12"):
        triton_cpu.launch(made_descriptor_kernel, (1,), x, o, 13, N=16)


def test_an_empty_tensor_can_hold_no_lane() -> None:
    with pytest.raises(OutOfBoundsError, match="'x' at element 0"):
        run("load", first=0, count=1, size=0)
