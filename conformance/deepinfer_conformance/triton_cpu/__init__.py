"""Triton kernels without their chip: run them on the CPU with the right numbers, watched, and compile them ahead.

Import it only where Triton is installed; nothing else of the suite does::

    from deepinfer_conformance import triton_cpu

    with triton_cpu.interpreted() as session:     # TRITON_INTERPRET may be set or not
        my_wrapper(x, y)                          # launches kernel[grid](...) on CPU tensors
    session.launches                              # kernel, grid, constexprs, options, pointers, in order

    triton_cpu.launch(kernel, (4,), x, y, n, BLOCK=128, num_warps=4)     # one launch in a block of its own

    request = triton_cpu.compile_request(kernel, {"x": "*bf16", "n": "i32"}, {"BLOCK": 128}, arch=100, num_warps=4)
    results = triton_cpu.compile_kernels([request], cache=folder)        # in processes of their own
    triton_cpu.check_kernels(results, triton_cpu.KernelLimits(expected=("UTCHMMA",)))
    triton_cpu.ttir_of(kernel, {"x": "*bf16", "n": "i32"}, {"BLOCK": 128})

Within the block bfloat16 and fp8 round as compiled code does, and every unmasked lane that leaves the storage of the
argument it was derived from raises `OutOfBoundsError`. See docs/triton-kit.md.
"""

from __future__ import annotations

from deepinfer_conformance.triton_cpu.ahead.pool import compile_kernel, compile_kernels, ttir_of, ttirs_of
from deepinfer_conformance.triton_cpu.ahead.request import CompileRequest, compile_request, compile_request_of
from deepinfer_conformance.triton_cpu.ahead.result import (
    MATRIX_INSTRUCTIONS,
    CompiledKernel,
    CompileFailure,
    KernelLimits,
    broken_limits,
    check_kernels,
)
from deepinfer_conformance.triton_cpu.errors import (
    CompilationError,
    InterpretationError,
    KernelLimitError,
    LaunchError,
    OutOfBoundsError,
    TritonVersionError,
)
from deepinfer_conformance.triton_cpu.launches import Launch, ScalarArgument, TensorArgument, launch_differences
from deepinfer_conformance.triton_cpu.session import Session, interpret_from_here, interpreted, launch
from deepinfer_conformance.triton_cpu.versions import PROVED_VERSIONS, require_proved_version

__all__ = [
    "MATRIX_INSTRUCTIONS",
    "PROVED_VERSIONS",
    "CompilationError",
    "CompileFailure",
    "CompileRequest",
    "CompiledKernel",
    "InterpretationError",
    "KernelLimitError",
    "KernelLimits",
    "Launch",
    "LaunchError",
    "OutOfBoundsError",
    "ScalarArgument",
    "Session",
    "TensorArgument",
    "TritonVersionError",
    "broken_limits",
    "check_kernels",
    "compile_kernel",
    "compile_kernels",
    "compile_request",
    "compile_request_of",
    "interpret_from_here",
    "interpreted",
    "launch",
    "launch_differences",
    "require_proved_version",
    "ttir_of",
    "ttirs_of",
]
