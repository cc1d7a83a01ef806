"""Launches are run, recorded in order, and refused where the compiled path would refuse."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from deepinfer_conformance import triton_cpu
from deepinfer_conformance.triton_cpu import InterpretationError, LaunchError, launch_differences

STEP = tl.constexpr(2)


@triton.jit
def doubled(v):
    return v * STEP


@triton.jit
def double_kernel(x, o, n, N: tl.constexpr, scale=1.0):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(o + i, doubled(tl.load(x + i, mask=i < n, other=0.0)) * scale, mask=i < n)


@triton.jit
def last_writer_kernel(o):
    tl.store(o, tl.program_id(0))


@triton.jit
def typed_kernel(x, o, TYPE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i).to(TYPE).to(tl.float32))


@triton.jit
def sum_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(o + i, v + v)


@triton.jit
def small_dot_kernel(x, o, N: tl.constexpr, K: tl.constexpr):
    i, k = tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + i[:, None] * K + k[None, :])
    tl.store(o + i[:, None] * N + i[None, :], tl.dot(a, tl.trans(a)))


@triton.jit
def careless_kernel(x, o, N: tl.constexpr):
    i = np.arange(0, N)  # noqa: F821  # the fault: this module has no np
    tl.store(o + i, tl.load(x + i))


@triton.heuristics({"N": lambda arguments: 16})
@triton.jit
def guessed_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i))


def test_a_launch_runs_every_program() -> None:
    x, o = torch.arange(40.0), torch.zeros(40)
    launch = triton_cpu.launch(double_kernel, (3,), x, o, 40, N=16)
    assert torch.equal(o, x * 2)
    assert launch.grid == (3, 1, 1)


def test_launches_are_recorded_in_order_with_everything_that_was_passed() -> None:
    x, o = torch.arange(8.0), torch.zeros(2, 8)
    with triton_cpu.interpreted() as session:
        double_kernel[lambda arguments: (triton.cdiv(arguments["n"], arguments["N"]),)](x, o[1], 8, N=4, num_warps=2)
        last_writer_kernel[(1, 2)](o)
    first, second = session.launches
    assert (first.kernel, second.kernel) == ("double_kernel", "last_writer_kernel")
    assert (first.grid, second.grid) == ((2, 1, 1), (1, 2, 1))
    assert [(item.name, item.value) for item in first.constexprs] == [("N", 4)]
    assert [(item.name, item.value) for item in first.options] == [("num_warps", 2)]
    assert [(item.name, item.value) for item in first.scalars] == [("n", 8), ("scale", 1.0)]
    assert first.pointers == (x.data_ptr(), o.data_ptr() + 32)
    assert [(item.name, item.shape, item.strides, item.dtype) for item in first.tensors] == [
        ("x", (8,), (1,), "torch.float32"),
        ("o", (8,), (1,), "torch.float32"),
    ]


def test_two_runs_differ_where_an_address_a_size_or_the_order_does() -> None:
    x, o = torch.arange(8.0), torch.zeros(8)

    def run(target: torch.Tensor, *, size: int = 4, warps: int = 4) -> list[triton_cpu.Launch]:
        with triton_cpu.interpreted() as session:
            double_kernel[(2,)](x, target, 8, N=size, num_warps=warps)
        return session.launches

    before, other = run(o), torch.zeros(8)
    assert launch_differences(before, run(o)) == ()
    assert launch_differences(before, run(other), ignore_pointers=True) == ()
    (moved,) = launch_differences(before, run(other))
    assert "launch 0 (double_kernel): 'o' has pointer" in moved
    assert launch_differences(before, run(o, size=8, warps=8)) == (
        "launch 0 (double_kernel): 'N' has value 4 against 8",
        "launch 0 (double_kernel): 'num_warps' has value 4 against 8",
    )
    assert launch_differences(before, [*before, *before]) == ("1 launches against 2",)
    assert launch_differences(before, [dataclasses.replace(before[0], grid=(3, 1, 1))]) == (
        "launch 0 (double_kernel): grid (2, 1, 1) against (3, 1, 1)",
    )


def test_a_failed_launch_is_recorded_and_names_its_program() -> None:
    with triton_cpu.interpreted() as session, pytest.raises(triton_cpu.OutOfBoundsError) as caught:
        double_kernel[(2,)](torch.zeros(4), torch.zeros(8), 8, N=4)
    assert len(session.launches) == 1
    assert caught.value.__notes__ == ["in kernel 'double_kernel', program (1, 0, 0) of grid (2, 1, 1)"]


def test_programs_that_overwrite_each_other_show_in_reverse_order() -> None:
    o = torch.zeros(1, dtype=torch.int32)
    found = []
    for order in ("forward", "reverse"):
        with triton_cpu.interpreted(program_order=order):
            last_writer_kernel[(4,)](o)
        found.append(o.item())
    assert found == [3, 0]


def test_heuristics_pass_through() -> None:
    x, o = torch.arange(16.0), torch.zeros(16)
    with triton_cpu.interpreted() as session:
        guessed_kernel[(1,)](x, o)
    assert torch.equal(o, x)
    assert session.launches[0].constexprs[0].value == 16


def test_a_launch_is_refused_with_every_reason() -> None:
    wrong = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(LaunchError) as caught:
        triton_cpu.launch(double_kernel, (1, 70_000), wrong, torch.zeros(4, device="meta"), 4, N=4, num_warsp=4)
    problems = caught.value.problems
    assert len(problems) == 4
    for part, problem in zip(
        ("'num_warsp' is neither", ".view(torch.uint8)", "is on meta", "grid"), problems, strict=True
    ):
        assert part in problem


def test_a_missing_argument_is_refused() -> None:
    with pytest.raises(LaunchError, match="missing a required argument: 'n'"):
        triton_cpu.launch(double_kernel, (1,), torch.zeros(4), torch.zeros(4), N=4)


@pytest.mark.parametrize("name", ["float8e4b8", "float8e4b15", "float8e5b16"])
def test_a_format_that_is_not_repaired_is_refused(name: str) -> None:
    with pytest.raises(InterpretationError, match="is not repaired"):
        triton_cpu.launch(typed_kernel, (1,), torch.ones(16), torch.zeros(16), TYPE=getattr(tl, name), N=16)


def test_what_does_not_compile_is_refused() -> None:
    codes = torch.zeros(16).to(torch.float8_e4m3fn)
    with pytest.raises(InterpretationError, match="arithmetic and comparisons on fp8e4nv do not compile"):
        triton_cpu.launch(sum_kernel, (1,), codes, torch.zeros(16).to(torch.float8_e4m3fn), N=16)
    with pytest.raises(InterpretationError, match="fp64 -> fp8e4nv does not compile"):
        triton_cpu.launch(typed_kernel, (1,), torch.ones(16).double(), torch.zeros(16), TYPE=tl.float8e4nv, N=16)


def test_a_dot_that_is_too_short_is_refused() -> None:
    o = torch.zeros(16, 16)
    triton_cpu.launch(small_dot_kernel, (1,), torch.zeros(16, 16).bfloat16(), o, N=16, K=16)
    with pytest.raises(AssertionError, match="K >= 16"):
        triton_cpu.launch(small_dot_kernel, (1,), torch.zeros(16, 8).bfloat16(), o, N=16, K=8)


def test_a_name_that_the_module_lacks_is_missing() -> None:
    with pytest.raises(NameError, match="'np'"):
        triton_cpu.launch(careless_kernel, (1,), torch.zeros(16), torch.zeros(16), N=16)


def test_blocks_do_not_nest() -> None:
    with triton_cpu.interpreted(), pytest.raises(InterpretationError, match="do not nest"):
        triton_cpu.launch(last_writer_kernel, (1,), torch.zeros(1))


@pytest.mark.parametrize("version", ["3.8.0", "3.9.1", "3.10.0"])
def test_an_unproved_version_is_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(triton_cpu.TritonVersionError, match=f"installed is '{version}'.*triton==3.9.0"):
        triton_cpu.launch(last_writer_kernel, (1,), torch.zeros(1))


def test_a_process_for_the_interpreter_gives_the_same(repairs: object) -> None:
    """Kernels are decorated differently under TRITON_INTERPRET=1; the block does not care."""
    code = (
        "import runpy; from deepinfer_conformance import triton_cpu\n"
        f"table = runpy.run_path({repairs.__file__!r})\n"  # type: ignore[attr-defined]
        "with triton_cpu.interpreted():\n"
        "    wrong = [item.name for item in table['REPAIRS'] if not table['agrees'](item)]\n"
        "raise SystemExit(str(wrong) if wrong else 0)"
    )
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_suite_itself_does_not_import_triton() -> None:
    code = (
        "import sys, deepinfer_conformance.suite, deepinfer_conformance.plugin\n"
        "raise SystemExit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
