"""A configuration: one compiled form of a kernel, as data that is launched, listed and compiled ahead of time alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's names of the dtypes that kernels read and write; bool tensors are passed as bytes."""

ALIGNED: list[list[str | int]] = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One compiled form of a kernel.

    Attributes:
        kernel: what :func:`deepinfer_triton.jit.kernel` returned.
        signature: Triton type of every parameter that is no constant, in order: "*bf16", "i64", "fp32".
        constants: value of every constant.
        num_warps: warps of a program (NVIDIA).
        num_stages: depth of software pipelines.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, int | bool]
    num_warps: int = 4
    num_stages: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel function."""
        return str(self.kernel.__name__)

    @property
    def label(self) -> str:
        """What distinguishes it from other configurations of its kernel."""
        pointers = [kind for kind in self.signature.values() if kind.startswith("*")]
        constants = [f"{name.lower()}={int(value)}" for name, value in self.constants.items()]
        return " ".join([",".join(pointers), *constants, f"warps={self.num_warps}", f"stages={self.num_stages}"])

    @property
    def options(self) -> Mapping[str, int]:
        """Compiler options, as a launch and ``triton.compile`` take them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def full_signature(self) -> dict[str, str]:
        """Return the type of every parameter in the kernel's order, "constexpr" for constants."""
        return {name: self.signature.get(name, "constexpr") for name in self.kernel.arg_names}

    @property
    def aligned(self) -> tuple[str, ...]:
        """Names of the parameters that a launch promises to be multiples of 16."""
        pointers = [name for name, kind in self.signature.items() if kind.startswith("*")]
        free = {parameter.name for parameter in self.kernel.params if parameter.do_not_specialize_on_alignment}
        return tuple(name for name in pointers if name not in free)

    def attributes(self) -> dict[tuple[int], list[list[str | int]]]:
        """Return the promise of :attr:`aligned` as ``ASTSource`` takes it."""
        return {(self.kernel.arg_names.index(name),): ALIGNED for name in self.aligned}


def pointers(**dtypes: torch.dtype) -> dict[str, str]:
    """Return the signature of tensor parameters by dtype, in the given order."""
    return {name: f"*{TYPE_NAMES[dtype]}" for name, dtype in dtypes.items()}


def launch(configuration: Configuration, grid: tuple[int, ...], *arguments: torch.Tensor | int | float) -> None:
    """Run a configuration; arguments are those of its signature, in order. An empty grid runs nothing."""
    if 0 not in grid:
        configuration.kernel[grid](*arguments, **configuration.constants, **configuration.options)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below ``count``: the extent of a block that holds it."""
    return 1 << (count - 1).bit_length()


def warps_for(elements: int) -> int:
    """Return a number of warps for a block of so many elements that a thread holds at least eight of them."""
    return max(1, min(8, power_of_two(elements) // 256))
