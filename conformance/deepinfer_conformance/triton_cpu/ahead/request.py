"""What to compile: a kernel by name, the types of its arguments, its constexprs, and for which GPU."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_conformance.triton_cpu.errors import LaunchError
from deepinfer_conformance.triton_cpu.launches import Launch
from deepinfer_conformance.triton_cpu.rewriting import is_constexpr

Json = dict[str, Any]
ARCHITECTURES = (90, 100)
_POINTERS = {
    "torch.bool": "i1",
    "torch.uint8": "u8",
    "torch.int8": "i8",
    "torch.int16": "i16",
    "torch.int32": "i32",
    "torch.int64": "i64",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float64": "fp64",
    "torch.float8_e4m3fn": "fp8e4nv",
    "torch.float8_e5m2": "fp8e5",
    # triton.reinterpret gives Triton's own names.
    "fp8e4nv": "fp8e4nv",
    "fp8e5": "fp8e5",
}


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """One kernel for one GPU; make it with `compile_request`.

    Attributes:
        module: where the kernel is imported from, or its file if the name cannot be imported.
        aligned: parameters that are multiples of 16, as the launcher would find of real arguments: without them no
            load is wide and nothing is copied asynchronously.
    """

    label: str
    module: str
    file: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    arch: int
    options: Mapping[str, object] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """The request as a worker reads it."""
        return {
            "module": self.module,
            "file": self.file,
            "kernel": self.kernel,
            "signature": dict(self.signature),
            "constexprs": {name: _constexpr_json(value) for name, value in self.constexprs.items()},
            "arch": self.arch,
            "options": dict(self.options),
            "aligned": list(self.aligned),
        }


def _constexpr_json(value: object) -> object:
    # A type, such as tl.bfloat16: its name stands for it.
    return value if isinstance(value, (int, float, str, type(None))) else {"triton_type": str(value)}


def compile_request(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    *,
    arch: int = 100,
    num_warps: int = 4,
    num_stages: int = 3,
    options: Mapping[str, object] | None = None,
    aligned: Collection[str] | None = None,
    label: str = "",
) -> CompileRequest:
    """Describe a compilation; raises `LaunchError` with everything that is wrong with it.

    Args:
        kernel: a ``@triton.jit`` function of a module (whether or not ``TRITON_INTERPRET`` was set).
        signature: type of each run-time parameter: ``"*bf16"``, ``"*fp8e4nv"``, ``"*u8"``, ``"i32"``, ``"fp32"``,
            ``"tensordesc<bf16[128,64]>"``.
        constexprs: value of each constexpr parameter without a default.
        arch: 90 for sm_90a, 100 for sm_100a.
        num_warps: warps of a block.
        num_stages: stages of software pipelining.
        options: further options of the compiler, for example ``{"maxnreg": 168}``.
        aligned: see `CompileRequest`; default: all pointers and integers.
        label: name in reports; default: kernel, GPU and constexprs.
    """
    function = python_function_of(kernel)
    parameters = inspect.signature(function).parameters
    fixed = {name for name, parameter in parameters.items() if is_constexpr(parameter.annotation)}
    given = {name: constexprs[name] for name in parameters if name in constexprs}
    defaults = {
        name: parameters[name].default
        for name in parameters
        if name in fixed and name not in given and parameters[name].default is not inspect.Parameter.empty
    }
    values = {**given, **defaults}
    problems = [f"{name!r} is no parameter" for name in (*signature, *constexprs) if name not in parameters]
    problems += [f"{name!r} has neither a type nor a value" for name in parameters if name not in {*signature, *values}]
    problems += [f"{name!r} has both a type and a value" for name in signature if name in values]
    problems += [f"{name!r} is a constexpr and needs a value" for name in signature if name in fixed]
    if arch not in ARCHITECTURES:
        problems.append(f"arch {arch}: choose from {ARCHITECTURES}")
    if "<locals>" in function.__qualname__:
        problems.append("it is defined inside a function, where a worker process cannot import it")
    problems += [f"{n!r} is aligned, but no run-time parameter" for n in (aligned or ()) if n not in signature]
    if problems:
        raise LaunchError(f"compile request for {function.__name__!r}", problems)
    settings = {"num_warps": num_warps, "num_stages": num_stages, **(options or {})}
    if aligned is None:
        aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind in ("i32", "i64")]
    shown = ", ".join(f"{name}={value}" for name, value in {**given, **settings}.items())
    return CompileRequest(
        label=label or f"{function.__name__} sm{arch} ({shown})",
        module=function.__module__,
        file=inspect.getsourcefile(function) or "",
        kernel=function.__qualname__,
        signature={name: signature[name] for name in parameters if name in signature},
        constexprs={name: values[name] for name in parameters if name in values},
        arch=arch,
        options=settings,
        aligned=tuple(name for name in parameters if name in aligned),
    )


def compile_request_of(kernel: Any, launch: Launch, *, arch: int = 100, label: str = "") -> CompileRequest:
    """Describe the compilation that a recorded launch would have needed, so that what ran is what is compiled.

    Types, constexprs, options and which arguments are multiples of 16 are the launch's. Tuples are not supported.
    """
    descriptors = {item.name.removesuffix(".descriptor"): item for item in launch.scalars if "." in item.name}
    signature, aligned, constexprs = {}, [], {item.name: item.value for item in launch.constexprs}
    for tensor in launch.tensors:
        element = _POINTERS.get(tensor.dtype, tensor.dtype)
        owner = tensor.name.removesuffix(".base")
        if owner in descriptors:
            block = descriptors[owner].value[2]  # type: ignore[index]  # bind_launch: shape, strides, block, padding
            signature[owner] = f"tensordesc<{element}[{','.join(map(str, block))}]>"
            continue
        signature[tensor.name] = f"*{element}"
        aligned += [tensor.name] if tensor.pointer % 16 == 0 else []
    for scalar in launch.scalars:
        if "." in scalar.name:
            continue
        if scalar.value is None:
            constexprs[scalar.name] = None
        elif isinstance(scalar.value, bool):
            signature[scalar.name] = "i1"
        elif isinstance(scalar.value, int):
            signature[scalar.name] = "i32" if -(2**31) <= scalar.value < 2**31 else "i64"
            aligned += [scalar.name] if scalar.value % 16 == 0 else []
        else:
            signature[scalar.name] = "fp32"
    options = {item.name: item.value for item in launch.options}
    return compile_request(kernel, signature, constexprs, arch=arch, options=options, aligned=aligned, label=label)


def python_function_of(kernel: Any) -> Any:
    """The Python function under any number of Triton's decorators."""
    function = kernel
    while not inspect.isfunction(function):
        if not hasattr(function, "fn"):
            raise LaunchError("compile request", [f"{kernel!r} is no Triton kernel: decorate it with @triton.jit"])
        function = function.fn
    return function
