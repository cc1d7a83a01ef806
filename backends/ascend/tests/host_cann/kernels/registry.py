"""A table of kernels per file, and the ways to write one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from host_cann.errors import HostCannError
from host_cann.prototypes import Prototype, parse
from host_cann.views import store

Function: TypeAlias = Callable[..., Any]
Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""What a kernel returns whose results have sizes of their own: the shape that each descriptor then shows."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A prototype and what computes it; the function gets every parameter by name, tensors as views."""

    prototype: Prototype
    function: Function


class KernelTable:
    """The kernels of one file."""

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}

    def add(self, line: str) -> Callable[[Function], Function]:
        """Register a function that takes every parameter of the prototype and writes its results itself."""

        def register(function: Function) -> Function:
            prototype = parse(line)
            if prototype.operator in self.kernels:
                raise HostCannError(f"{prototype.operator} has two kernels")
            self.kernels[prototype.operator] = Kernel(prototype, function)
            return function

        return register

    def pure(self, line: str, function: Function) -> None:
        """Register a function of the parameters that are read, in order; its results go to those that are written."""
        prototype = parse(line)
        read = [parameter.name for parameter in prototype.parameters if parameter.is_read]
        written = [parameter.name for parameter in prototype.written]

        def compute(**arguments: Any) -> None:
            result = function(*(arguments[name] for name in read))
            results = (result,) if isinstance(result, Tensor) else result
            for name, value in zip(written, results, strict=True):
                if arguments[name] is not None:
                    store(arguments[name], value)

        self.add(line)(compute)


def merge(tables: Iterable[KernelTable]) -> Mapping[str, Kernel]:
    """Return the kernels of all tables, none of which may repeat an operator."""
    merged: dict[str, Kernel] = {}
    for table in tables:
        doubled = sorted(merged.keys() & table.kernels.keys())
        if doubled:
            raise HostCannError(f"two kernels each for {', '.join(doubled)}")
        merged |= table.kernels
    return merged
