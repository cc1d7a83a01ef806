"""Kernels compile for GPUs that are not here; every broken limit is named, and no compiler takes the caller down."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from deepinfer_conformance import triton_cpu
from deepinfer_conformance.triton_cpu import (
    CompilationError,
    CompiledKernel,
    CompileFailure,
    CompileRequest,
    KernelLimitError,
    KernelLimits,
    LaunchError,
    broken_limits,
    check_kernels,
)
from deepinfer_conformance.triton_cpu.ahead import pool

ADD = {"x": "*bf16", "y": "*bf16", "o": "*bf16", "n": "i32"}
MATMUL = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "K": "i32"}


Results = Mapping[str, CompiledKernel | CompileFailure]


def requests_of(kernels: ModuleType) -> dict[str, CompileRequest]:
    def matmul(bm: int, bn: int, bk: int, arch: int, **settings: Any) -> CompileRequest:
        constexprs = {"BM": bm, "BN": bn, "BK": bk}
        return triton_cpu.compile_request(kernels.matmul_kernel, MATMUL, constexprs, arch=arch, **settings)

    softmax = {"x": "*fp32", "o": "*fp32"}
    codes = {"x": "*fp8e4nv", "o": "*fp8e4nv"}
    few = {"maxnreg": 32}
    return {
        "add": triton_cpu.compile_request(kernels.add_kernel, ADD, {"N": 1024}),
        "native": matmul(128, 128, 64, 100),
        "wgmma": matmul(64, 128, 64, 90),
        "fallback": matmul(16, 64, 64, 100),
        "spills": triton_cpu.compile_request(kernels.softmax_kernel, softmax, {"N": 2048}, num_warps=1, options=few),
        "too much shared memory": matmul(64, 128, 256, 90, num_stages=3),
        "does not compile": triton_cpu.compile_request(kernels.small_float_sum_kernel, codes, {"N": 128}),
    }


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    name = "triton_kit_compiled_kernels"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("compiled_kernels.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(kernels: ModuleType) -> Results:
    """Compiled from a process that is set up for the interpreter, as a vendor's tests may be."""
    requests = requests_of(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return dict(zip(requests, triton_cpu.compile_kernels(list(requests.values())), strict=True))


@pytest.fixture(scope="module")
def ttirs(kernels: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | CompileFailure]:
    """One worker after another: two of the five take it down."""
    good = triton_cpu.compile_request(kernels.add_kernel, ADD, {"N": 64, "TYPE": tl.bfloat16})
    unknown = triton_cpu.compile_request(kernels.add_kernel, {**ADD, "x": "*not_there"}, {"N": 64})

    def broken(name: str, line: str) -> CompileRequest:
        path = tmp_path_factory.mktemp(name) / f"{name}.py"
        path.write_text(f"import os, time\n{line}\n")
        return dataclasses.replace(good, label=name, module=name, file=str(path))

    requests = {"dies": broken("dies", "os._exit(7)"), "good": good, "unknown": unknown}
    requests["hangs"] = broken("hangs", "time.sleep(600)")
    return dict(zip(requests, triton_cpu.ttirs_of(list(requests.values()), workers=1, limit_s=5.0), strict=True))


def compiled(results: Results, name: str) -> CompiledKernel:
    found = results[name]
    assert isinstance(found, CompiledKernel), found
    return found


def test_a_good_kernel_keeps_all_limits(results: Results) -> None:
    found = compiled(results, "add")
    check_kernels([found])
    assert (found.kernel, found.arch, found.num_warps, found.spill_bytes) == ("add_kernel", 100, 4, 0)
    assert found.triton_version == triton.__version__
    assert 8 <= found.registers <= 64
    assert found.matrix_instructions == {}
    assert "ld.global.v" in found.ptx  # what `aligned` is for


def test_the_matrix_unit_is_read_from_the_binary(results: Results) -> None:
    native, wgmma, fallback = (compiled(results, name) for name in ("native", "wgmma", "fallback"))
    assert list(native.matrix_instructions) == ["UTCHMMA"]
    assert list(wgmma.matrix_instructions) == ["HGMMA"]
    assert list(fallback.matrix_instructions) == ["HMMA"]
    assert native.tensor_memory_columns == 128
    assert any(name.startswith("tcgen05.mma") for name in native.ptx_instructions)


def test_a_fallback_to_the_old_matrix_unit_is_found(results: Results) -> None:
    limits = KernelLimits(expected=("UTCHMMA",), forbidden=("HMMA",))
    assert broken_limits(compiled(results, "native"), limits) == ()
    missing, old = broken_limits(compiled(results, "fallback"), limits)
    assert "no UTCHMMA (tcgen05.mma kind::f16 or tf32)" in missing
    assert re.search(r"\d+ HMMA \(mma.sync .* the old path\), none allowed", old)


def test_a_spill_is_found(results: Results) -> None:
    found = compiled(results, "spills")
    assert found.memory_instructions["STL"] > 0
    assert found.spill_bytes > 0
    (problem,) = broken_limits(found, KernelLimits())
    assert f"spills {found.spill_bytes} bytes a thread" in problem
    assert broken_limits(found, KernelLimits(spill_bytes=found.spill_bytes)) == ()


def test_shared_memory_that_no_driver_would_load_is_found(results: Results) -> None:
    found = compiled(results, "too much shared memory")
    assert any(
        "shared memory" in problem and "at most 232448" in problem for problem in broken_limits(found, KernelLimits())
    )


def test_tensor_memory_beyond_its_columns_is_found(results: Results) -> None:
    found = dataclasses.replace(compiled(results, "native"), tensor_memory_columns=513)
    (problem,) = broken_limits(found, KernelLimits())
    assert "tensor memory 513, at most 512 columns" in problem


def test_registers_can_be_limited(results: Results) -> None:
    found = compiled(results, "add")
    assert broken_limits(found, KernelLimits(registers=found.registers)) == ()
    (problem,) = broken_limits(found, KernelLimits(registers=found.registers - 1))
    assert f"registers {found.registers}" in problem


def test_without_a_disassembler_no_instruction_passes(results: Results) -> None:
    found = dataclasses.replace(compiled(results, "native"), has_sass=False, matrix_instructions={})
    (problem,) = broken_limits(found, KernelLimits(forbidden=("HMMA",)))
    assert "nvdisasm" in problem


def test_a_kernel_that_does_not_compile_brings_the_compilers_words(results: Results) -> None:
    found = results["does not compile"]
    assert isinstance(found, CompileFailure)
    assert "llvm.fadd" in found.message


def test_all_problems_of_all_kernels_come_at_once(results: Results) -> None:
    with pytest.raises(KernelLimitError) as caught:
        check_kernels(list(results.values()), KernelLimits(forbidden=("HMMA",)))
    text = "\n".join(caught.value.problems)
    for part in ("HMMA (mma.sync", "spills", "shared memory", "does not compile"):
        assert part in text
    assert "add_kernel" not in text


def test_limits_can_be_given_one_by_one(results: Results) -> None:
    pair = [compiled(results, "native"), compiled(results, "wgmma")]
    check_kernels(pair, [KernelLimits(expected=("UTCHMMA",)), KernelLimits(expected=("HGMMA",))])
    with pytest.raises(KernelLimitError, match="2 problems"):
        check_kernels(pair, [KernelLimits(expected=("HGMMA",)), KernelLimits(expected=("UTCHMMA",))])


def test_a_cached_result_is_the_first_one_and_a_changed_helper_is_compiled_anew(tmp_path: Path) -> None:
    source = (
        "import triton, triton.language as tl\n"
        "@triton.jit\ndef helper(v):\n    return v * 2\n"
        "@triton.jit\ndef kernel(x, N: tl.constexpr):\n"
        "    i = tl.arange(0, N)\n    tl.store(x + i, helper(tl.load(x + i)))\n"
    )
    requests = []
    for folder, text in (("one", source), ("two", source.replace("v * 2", "v * v"))):
        path = tmp_path / folder / "kernels.py"
        path.parent.mkdir()
        path.write_text(text)
        requests.append(CompileRequest("", "kernels_of_a_test", str(path), "kernel", {"x": "*fp32"}, {"N": 128}, 100))
    cache = tmp_path / "cache"
    first, again, changed = triton_cpu.compile_kernels([requests[0], *requests], workers=1, cache=cache)
    assert isinstance(first, CompiledKernel)
    assert isinstance(changed, CompiledKernel)
    assert again == first  # to the microsecond of compile_s
    assert changed.ptx != first.ptx
    assert len(list(cache.glob("*.json"))) == 2


def test_a_compiler_that_dies_or_hangs_is_that_kernels_result(ttirs: Mapping[str, str | CompileFailure]) -> None:
    assert ttirs["dies"] == CompileFailure("dies", "the compiler's process ended: status 7")
    assert isinstance(ttirs["good"], str)
    hung = CompileFailure("hangs", "the compiler's process ended: stopped at the limit of 5 s")
    assert ttirs["hangs"] == hung


def test_ttir_is_the_code_before_any_vendor(ttirs: Mapping[str, str | CompileFailure]) -> None:
    ttir, failure = ttirs["good"], ttirs["unknown"]
    assert isinstance(ttir, str)
    assert "tt.func public @add_kernel" in ttir
    assert ttir.count("tt.load") == 2
    assert "ttg." not in ttir
    assert re.search(r"arith.addf .* tensor<64xbf16>", ttir)
    assert isinstance(failure, CompileFailure)
    assert "not_there" in failure.message


def test_a_type_as_a_constexpr_travels_by_its_name(kernels: ModuleType) -> None:
    request = triton_cpu.compile_request(kernels.add_kernel, ADD, {"N": 64, "TYPE": tl.bfloat16})
    assert request.to_json()["constexprs"] == {"N": 64, "TYPE": {"triton_type": "bf16"}}


def test_a_failure_of_one_kernel_is_raised(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType) -> None:
    monkeypatch.setattr(pool, "_answers", lambda requests, stage, **options: [{"error": "compiler's words"}])
    for call in (
        lambda: triton_cpu.ttir_of(kernels.add_kernel, ADD, {"N": 64}),
        lambda: triton_cpu.compile_kernel(requests_of(kernels)["add"]),
    ):
        with pytest.raises(CompilationError, match=r"add_kernel .*: compiler's words"):
            call()


def test_a_request_is_refused_with_every_reason() -> None:
    @triton.jit
    def local_kernel(x, n, N: tl.constexpr):
        tl.store(x, n)

    with pytest.raises(LaunchError) as caught:
        triton_cpu.compile_request(local_kernel, {"x": "*fp32", "m": "i32"}, {}, arch=80, aligned=["q"])
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    for part in (
        "'m' is no parameter",
        "'n' has neither",
        "'N' has neither",
        "arch 80",
        "defined inside",
        "'q' is aligned",
    ):
        assert part in text


def test_what_ran_can_be_compiled_as_it_ran(kernels: ModuleType) -> None:
    x = torch.zeros(130, dtype=torch.bfloat16)
    launch = triton_cpu.launch(kernels.add_kernel, (2,), x[:128], x[2:], x[:128], 128, N=64, num_warps=2)
    request = triton_cpu.compile_request_of(kernels.add_kernel, launch, arch=90)
    assert request.signature == ADD
    assert request.aligned == ("x", "o", "n")
    assert request.constexprs == {"N": 64, "TYPE": tl.float32}
    assert request.options == {"num_warps": 2, "num_stages": 3}
    assert "sm90" in request.label
