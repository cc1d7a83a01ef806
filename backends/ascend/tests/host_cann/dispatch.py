"""Turns call frames of aclnn operators into prepared calls, and runs them."""

from __future__ import annotations

import ctypes
import struct
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from host_cann.descriptors import Argument, DescriptorKind, ScalarArgument, TensorArgument, read
from host_cann.errors import KernelError
from host_cann.kernels.registry import Kernel, Shapes
from host_cann.prototypes import Parameter, Passing
from host_cann.views import DeviceMemory, MemoryRefusedError, as_stored

REFUSED_CALL = 561103
_INTEGER_REGISTERS, _FLOAT_REGISTERS = 6, 8
_UNKNOWN_WORDS = 40
_STACK_REACH_BYTES = 1 << 20
_MASKS = {Passing.INTEGER: 64, Passing.INTEGER_32: 32, Passing.BYTE: 8}

Prepare = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
)  # fmt: skip
Execute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call after phase 1: everything but the stream."""

    operator: str
    arguments: tuple[tuple[str, Argument], ...]
    kernel: Kernel | None


class _Frame:
    """The argument words of a call, in order."""

    def __init__(self, integers: Any, floats: Any, stack: Any) -> None:
        self._integers, self._floats, self._stack = integers, floats, stack
        self._next_integer = self._next_float = self._next_stack = 0
        self._stack_address = ctypes.addressof(stack.contents)

    def integer(self) -> int:
        if self._next_integer < _INTEGER_REGISTERS:
            self._next_integer += 1
            return int(self._integers[self._next_integer - 1])
        return self._on_stack()

    def floating(self) -> int:
        if self._next_float < _FLOAT_REGISTERS:
            self._next_float += 1
            return int(self._floats[self._next_float - 1])
        return self._on_stack()

    def _on_stack(self) -> int:
        self._next_stack += 1
        return int(self._stack[self._next_stack - 1])

    def is_result(self, word: int) -> bool:
        """Whether ``word`` is the address of a local variable that is zero, as torch_npu passes for results."""
        near = abs(word - self._stack_address) < _STACK_REACH_BYTES
        return near and word % 8 == 0 and ctypes.c_uint64.from_address(word).value == 0


class Dispatcher:
    """Knows the kernels; the library calls it for both phases of every operator."""

    def __init__(self, library: ctypes.CDLL, kernels: Mapping[str, Kernel]) -> None:
        self._library = library
        self._kernels = dict(kernels)
        self._memory = DeviceMemory(library)
        self._kind_of = library.host_cann_kind_of
        self._kind_of.argtypes = [ctypes.c_void_p]
        library.host_cann_set_reason.argtypes = [ctypes.c_char_p]
        library.host_cann_set_view_shape.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        library.host_cann_set_pending.argtypes = [ctypes.c_int64]
        self._serial = 0
        self._computes = True
        self._keeps = False
        self._executed: list[int] = []
        self.calls: dict[int, PreparedCall] = {}
        self._callbacks = (Prepare(self._prepare), Execute(self._execute))
        library.host_cann_set_callbacks(*self._callbacks)

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators with a kernel."""
        return tuple(sorted(self._kernels))

    def keep_calls(self, *, keep: bool) -> None:
        """Remember executed calls for a recording, or forget them."""
        self._keeps = keep
        while self._executed and not keep:
            self.calls.pop(self._executed.pop())

    @contextmanager
    def calls_only(self) -> Iterator[None]:
        """Run no kernel and accept operators without one; what they should have written stays as it was."""
        self._computes, before = False, self._computes
        try:
            yield
        finally:
            self._computes = before

    @contextmanager
    def replaced(self, operator: str, kernel: Kernel | None) -> Iterator[None]:
        """Use another kernel, or none, for ``operator``."""
        before = self._kernels.pop(operator, None)
        if kernel is not None:
            self._kernels[operator] = kernel
        try:
            yield
        finally:
            self._kernels.pop(operator, None)
            if before is not None:
                self._kernels[operator] = before

    def _prepare(self, name: bytes, integers: Any, floats: Any, stack: Any) -> int:
        operator = name.decode()
        try:
            kernel = self._kernel(operator)
            frame = _Frame(integers, floats, stack)
            arguments = self._known(frame, kernel) if kernel else self._unknown(frame)
            self._serial += 1
            self.calls[self._serial] = PreparedCall(operator, arguments, kernel)
            self._library.host_cann_set_pending(self._serial)
        except Exception as problem:  # noqa: BLE001 (nothing may pass into C; the caller gets it as an error of the call)
            return self._refuse(operator, problem)
        return 0

    def _kernel(self, operator: str) -> Kernel | None:
        kernel = self._kernels.get(operator)
        if kernel is None and self._computes:
            raise KernelError("has no host kernel")
        return kernel

    def _known(self, frame: _Frame, kernel: Kernel) -> tuple[tuple[str, Argument], ...]:
        arguments = tuple(
            (parameter.name, self._argument(frame, parameter)) for parameter in kernel.prototype.parameters
        )
        if not (frame.is_result(frame.integer()) and frame.is_result(frame.integer())):
            raise KernelError(
                f"was called with other arguments than its prototype names: {[name for name, _ in arguments]}"
            )
        return arguments

    def _argument(self, frame: _Frame, parameter: Parameter) -> Argument:
        if parameter.passing in (Passing.DOUBLE, Passing.FLOAT):
            raw = frame.floating().to_bytes(8, "little")
            return float(struct.unpack("<d" if parameter.passing == Passing.DOUBLE else "<f4x", raw)[0])
        word = frame.integer()
        if parameter.passing == Passing.DESCRIPTOR:
            kind = self._kind_of(word) if word else DescriptorKind.NOTHING
            if kind == DescriptorKind.NOTHING and word == 0 and parameter.is_optional:
                return None
            if kind != parameter.kind:
                found = DescriptorKind(kind).name if word else "null"
                raise KernelError(f"parameter {parameter.name!r} is {found}, not {parameter.kind.name}")
            return read(word, parameter.kind)
        if parameter.passing == Passing.TEXT:
            return ctypes.string_at(word).decode() if word else None
        if parameter.passing == Passing.BOOLEAN:
            return bool(word & 0xFF)
        bits = _MASKS[parameter.passing]
        value = word & ((1 << bits) - 1)
        return value - (1 << bits) if value >> (bits - 1) else value

    def _unknown(self, frame: _Frame) -> tuple[tuple[str, Argument], ...]:
        """Return what can be recognised of an operator without prototype: its descriptors, by position."""
        found: list[tuple[str, Argument]] = []
        previous_is_result = False
        for position in range(_UNKNOWN_WORDS):
            word = frame.integer()
            kind = self._kind_of(word) if word else 0
            if kind:
                found.append((str(position), read(word, DescriptorKind(kind))))
            is_result = frame.is_result(word)
            if is_result and previous_is_result:
                break
            previous_is_result = is_result
        return tuple(found)

    def _execute(self, serial: int, device: int, again: int) -> int:
        # A call inside of a graph is never forgotten: the next replay asks for it.
        call = self.calls[serial] if again or self._keeps else self.calls.pop(serial)
        if self._keeps and not again:
            self._executed.append(serial)
        if call.kernel is None or not self._computes:
            return 0
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                stored = {parameter.name for parameter in call.kernel.prototype.parameters if parameter.is_storage}
                given = {
                    name: self._view(as_stored(value) if name in stored else value, device, f"{call.operator} {name}")
                    for name, value in call.arguments
                }
                shapes = call.kernel.function(**given)
                if shapes:
                    self._set_shapes(call, shapes, again=bool(again))
        except MemoryRefusedError:
            return REFUSED_CALL
        except Exception as problem:  # noqa: BLE001 (as above)
            return self._refuse(call.operator, problem, call)
        return 0

    def _set_shapes(self, call: PreparedCall, shapes: Shapes, *, again: bool) -> None:
        if again:
            raise KernelError("has results of unknown size, which a graph cannot hold")
        for name, value in call.arguments:
            if name in shapes and isinstance(value, TensorArgument):
                shape = shapes[name]
                self._library.host_cann_set_view_shape(value.handle, (ctypes.c_int64 * len(shape))(*shape), len(shape))

    def _view(self, value: Argument, device: int, what: str) -> Any:
        if isinstance(value, TensorArgument):
            return self._memory.view(value, device, what)
        if isinstance(value, ScalarArgument):
            return value.value
        if isinstance(value, tuple):
            return [self._view(item, device, f"{what}[{index}]") for index, item in enumerate(value)]
        return value

    def _refuse(self, operator: str, problem: Exception, call: PreparedCall | None = None) -> int:
        reason = (
            f"{operator} {problem}"
            if isinstance(problem, KernelError)
            else f"{operator}: {traceback.format_exc(limit=-3)}"
        )
        if call is not None:
            shapes = [
                f"{name} {value.dtype}{list(value.shape)}"
                for name, value in call.arguments
                if isinstance(value, TensorArgument)
            ]
            reason += f" ({', '.join(shapes)})"
        self._library.host_cann_set_reason(reason[:1900].encode())
        return REFUSED_CALL
