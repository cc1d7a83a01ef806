"""A launch's arguments: checked as the compiled path would, and made into what the interpreter reads."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from deepinfer_conformance.triton_cpu.bounds import Operand, operand_of
from deepinfer_conformance.triton_cpu.errors import LaunchError
from deepinfer_conformance.triton_cpu.launches import Launch, ScalarArgument, TensorArgument
from deepinfer_conformance.triton_cpu.rewriting import is_constexpr

_OPTIONS = frozenset(field.name for field in dataclasses.fields(CUDAOptions))
_LARGEST_GRID = (2**31 - 1, 65_535, 65_535)
_AS_BYTES = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


@dataclass(frozen=True, slots=True)
class Bound:
    """A launch whose arguments have found their parameters."""

    launch: Launch
    operands: tuple[Operand, ...]
    arguments: Mapping[str, Any]
    constexpr_names: frozenset[str]

    def device_values(self) -> dict[str, Any]:
        """What the kernel's Python source is called with."""
        operands = {operand.name: operand for operand in self.operands}
        return {
            name: value if name in self.constexpr_names else _device_value(name, value, operands)
            for name, value in self.arguments.items()
        }


def bind_launch(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    grid: Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]],
    named: Mapping[str, Any],
    *,
    view_only: bool,
) -> Bound:
    """Raises `LaunchError` with every reason why the launch cannot be what the caller meant."""
    signature = inspect.signature(function)
    options = {name: value for name, value in named.items() if name not in signature.parameters}
    own = {name: value for name, value in named.items() if name in signature.parameters}
    problems = [
        f"{name!r} is neither a parameter ({', '.join(signature.parameters)}) nor an option of the compiler"
        for name in options
        if name not in _OPTIONS
    ]
    try:
        found = signature.bind(*arguments, **own)
    except TypeError as error:
        raise LaunchError(f"launch of {function.__name__!r}", [*problems, str(error)]) from error
    found.apply_defaults()
    constexprs = frozenset(n for n, parameter in signature.parameters.items() if is_constexpr(parameter.annotation))
    parts = [
        part for name, value in found.arguments.items() if name not in constexprs for part in _parts_of(name, value)
    ]
    for name, value in parts:
        problems += _problems_of(name, value)
    sizes = tuple(int(size) for size in (grid(dict(found.arguments)) if callable(grid) else grid))
    if len(sizes) > 3 or any(size < 0 or size > limit for size, limit in zip(sizes, _LARGEST_GRID, strict=False)):
        problems.append(f"grid {sizes}: at most three sizes, from 0 to {_LARGEST_GRID}")
    if problems:
        raise LaunchError(f"launch of {function.__name__!r}", problems)
    x, y, z = (*sizes, 1, 1, 1)[:3]
    tensors = [(name, _unwrapped(value)) for name, value in parts if hasattr(value, "data_ptr")]
    launch = Launch(
        kernel=function.__name__,
        grid=(x, y, z),
        constexprs=tuple(ScalarArgument(n, v) for n, v in found.arguments.items() if n in constexprs),
        options=tuple(ScalarArgument(name, value) for name, value in sorted(options.items())),
        tensors=tuple(
            TensorArgument(n, t.data_ptr(), tuple(t.shape), tuple(t.stride()), str(t.dtype)) for n, t in tensors
        ),
        scalars=tuple(ScalarArgument(name, value) for name, value in parts if not hasattr(value, "data_ptr")),
    )
    operands = tuple(operand_of(name, tensor, view_only=view_only) for name, tensor in tensors)
    return Bound(launch, operands, found.arguments, constexprs)


def _parts_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """A tuple's items and a descriptor's tensor under names of their own."""
    if isinstance(value, tuple):
        return [part for index, item in enumerate(value) for part in _parts_of(f"{name}[{index}]", item)]
    if isinstance(value, TensorDescriptor):
        described = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape), value.padding)
        return [(f"{name}.base", value.base), (f"{name}.descriptor", described)]
    return [(name, value)]


def _unwrapped(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.base if isinstance(value, triton.runtime.jit.TensorWrapper) else value
    return tensor


def _problems_of(name: str, value: Any) -> list[str]:
    if not hasattr(value, "data_ptr"):
        return []
    tensor = _unwrapped(value)
    problems = []
    if tensor.device.type != "cpu":
        problems.append(f"{name!r} is on {tensor.device}; the interpreter reads host memory: pass a CPU tensor")
    if value.dtype in _AS_BYTES:
        problems.append(f"{name!r} is {value.dtype}, which Triton has no pointer for: pass .view(torch.uint8)")
    return problems


def _device_value(name: str, value: Any, operands: Mapping[str, Operand]) -> Any:
    if isinstance(value, tuple):
        items = [_device_value(f"{name}[{index}]", item, operands) for index, item in enumerate(value)]
        return interpreter._tuple_create(value, items)
    if isinstance(value, float):
        # A run-time float is a float32 scalar to the compiler, and takes part in type promotion; stock passes the
        # Python number, so that bfloat16 times scale stays bfloat16.
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    converted = interpreter._implicit_cvt(value)
    if isinstance(value, TensorDescriptor):
        converted.handle.base.set_attr("operand", operands[f"{name}.base"])
    elif hasattr(value, "data_ptr"):
        converted.handle.set_attr("operand", operands[name])
    return converted
