"""Runs kernels on this machine from their lowered form: what triton-adapter made of them, compiled by LLVM for x86.

The kernels' own host functions run as they are; only the launch is another. It shows that the Linalg form means what
the kernel means. It says nothing about the steps behind it, which are for the chip's cores alone.
"""

from __future__ import annotations

import ctypes
import importlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.errors import DriverUnavailableError
from deepinfer_ascend.lowering_check.execution_cases import CASES
from deepinfer_ascend.lowering_check.kernels import Candidate, ttir_of
from deepinfer_ascend.lowering_check.report import Entry
from deepinfer_ascend.lowering_check.tools import LoweringError, Tools
from deepinfer_ascend.providers import TRITON_PACKAGE

_LLVM: Final = Path("/usr/lib/llvm-19")
_RUNTIME: Final = _LLVM / "lib" / "libmlir_c_runner_utils.so.19.1"
_PROGRAMS: Final = ("mlir-opt-19", "mlir-translate-19", "gcc")
_PASSES: Final = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-cf-to-llvm",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm=use-bare-ptr-memref-call-conv=0",
    "--convert-arith-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
_SCALARS: Final[dict[str, Any]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class LoweredKernels:
    """Compiles configurations when they are first launched, and launches them."""

    def __init__(self, tools: Tools, folder: Path) -> None:
        self._tools = tools
        self._folder = folder
        self._functions: dict[tuple[str, str], Any] = {}
        self.launched: list[str] = []
        ctypes.CDLL(str(_RUNTIME), mode=ctypes.RTLD_GLOBAL)

    def launch(self, configuration: Any, grid: tuple[int, ...], *arguments: Tensor | int | float) -> None:
        """Stand in the place of the kernels' launch: one program after the other."""
        key = (configuration.name, configuration.label)
        if key not in self._functions:
            self._functions[key] = self._compiled(configuration, f"kernel{len(self._functions)}")
        self.launched.append(configuration.name)
        function, nothing = self._functions[key], torch.zeros(1, dtype=torch.int8)
        words = [*_memory(nothing), *_memory(nothing)]  # locks between cores and a work space, neither of which is used
        for kind, argument in zip(configuration.signature.values(), arguments, strict=True):
            words += _memory(argument) if isinstance(argument, Tensor) else [_SCALARS[kind](argument)]
        sizes = (*grid, 1, 1)[:3]
        for place in product(*map(range, sizes)):
            function(*words, *map(ctypes.c_int32, (*sizes, *place)))

    def _compiled(self, configuration: Any, name: str) -> Any:
        linalg = self._tools.to_linalg(ttir_of(Candidate((), configuration)))
        source, path = self._folder / f"{name}.mlir", self._folder / name
        source.write_text(linalg.replace("{hivm.unlikely_condition}", ""))
        steps = (
            ("mlir-opt-19", source, "--allow-unregistered-dialect", *_PASSES, "-o", f"{path}.llvm.mlir"),
            ("mlir-translate-19", f"{path}.llvm.mlir", "--mlir-to-llvmir", "-o", f"{path}.ll"),
            (_LLVM / "bin" / "llc", "-O2", "-relocation-model=pic", "-filetype=obj", f"{path}.ll", "-o", f"{path}.o"),
            ("gcc", "-shared", "-o", f"{path}.so", f"{path}.o", "-lm"),
        )
        for step in steps:
            command = [str(word) for word in step]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
            if done.returncode:
                raise LoweringError(f"{command[0]} ended with status {done.returncode}: {done.stderr.strip()[:300]}")
        function = getattr(ctypes.CDLL(f"{path}.so"), configuration.name)
        function.restype = None
        return function


def _memory(tensor: Tensor) -> list[Any]:
    """Return a one-dimensional memory descriptor: allocated, aligned, offset, size, stride."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    address = tensor.data_ptr()
    return [
        ctypes.c_void_p(address),
        ctypes.c_void_p(address),
        ctypes.c_int64(0),
        ctypes.c_int64(reach),
        ctypes.c_int64(1),
    ]


@contextmanager
def launching(lowered: LoweredKernels) -> Iterator[None]:
    """Launch the kernels of the package from their lowered form."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{TRITON_PACKAGE}.")]
    places = [module for module in modules if hasattr(module, "launch")]
    before = [module.launch for module in places]
    for module in places:
        module.launch = lowered.launch  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, launch in zip(places, before, strict=True):
            module.launch = launch  # type: ignore[attr-defined]


def require() -> None:
    """Raise DriverUnavailableError, with what to do, where lowered kernels cannot be executed."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    missing += [str(path) for path in (_LLVM / "bin" / "llc", _RUNTIME) if not path.exists()]
    if platform.machine() != "x86_64":
        missing.append("a processor of x86_64")
    if missing:
        raise DriverUnavailableError(
            f"executing lowered kernels needs {', '.join(missing)}; on Debian: "
            f"`apt-get install mlir-19-tools llvm-19 libmlir-19-dev gcc`, or leave --execute out"
        )


def check(tools: Tools) -> Sequence[Entry]:
    """Return an entry for each case: a kernel's result from its lowered form, against torch."""
    require()
    importlib.import_module(f"{TRITON_PACKAGE}.registry")
    entries: list[Entry] = []
    with tempfile.TemporaryDirectory(prefix="deepinfer-lowered-") as folder:
        lowered = LoweredKernels(tools, Path(folder))
        for case in CASES:
            started = time.perf_counter()
            lowered.launched.clear()
            try:
                with launching(lowered):
                    problem = case.problem()
                if not lowered.launched:
                    problem = "no kernel was launched"
            except (LoweringError, RuntimeError, TypeError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            kernels = " + ".join(dict.fromkeys(lowered.launched)) or "none"
            seconds = round(time.perf_counter() - started, 2)
            entries.append(
                Entry(
                    case.op,
                    "any",
                    "executed on x86",
                    "failed" if problem else "ok",
                    kernels,
                    case.name,
                    seconds,
                    problem,
                )
            )
    return entries
