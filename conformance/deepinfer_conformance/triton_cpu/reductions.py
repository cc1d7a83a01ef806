"""Reductions and scans over bfloat16: stock adds and compares its codes."""

# ruff: noqa: D102  # the methods are Triton's, and so are their contracts

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from deepinfer_conformance.triton_cpu.arithmetic import handle_of, values_of
from deepinfer_conformance.triton_cpu.formats import BF16, Array

_INDEXED = (
    "_argmin_combine_tie_break_left",
    "_argmin_combine_tie_break_fast",
    "_argmax_combine_tie_break_left",
    "_argmax_combine_tie_break_fast",
)
_EXTREME = ("_elementwise_max", "_elementwise_min")


def _is_bf16(tensor: Any) -> bool:
    return str(tensor.dtype) == BF16.name


def _combines(combine: Any, names: tuple[str, ...]) -> bool:
    return any(combine is getattr(tl.standard, name) for name in names)


def _widened(tensor: Any) -> Any:
    values = values_of(tensor.handle)
    return tl.core.tensor(interpreter.TensorHandle(values, tl.float32), tl.block_type(tl.float32, list(values.shape)))


def _narrowed(tensor: Any) -> Any:
    handle = handle_of(tensor.handle.data, tl.bfloat16)
    shape = list(tensor.handle.data.shape) if tensor.type.is_block() else []
    return tl.core.tensor(handle, tl.block_type(tl.bfloat16, shape) if shape else tl.bfloat16)


def _rounded(values: Array) -> Array:
    return BF16.decode(BF16.encode(values))


def rounded_sum(values: Array, axis: int | None) -> Array:
    """Adds by halves, rounding every addition to bfloat16 as ``add.bf16`` does."""
    rest = values.reshape(-1) if axis is None else np.moveaxis(values, axis, 0)
    while rest.shape[0] > 1:
        half = rest.shape[0] // 2
        rest = np.concatenate([_rounded(rest[:half] + rest[half : 2 * half]), rest[2 * half :]])
    total: Array = rest[0]
    return total


class ReduceOps(interpreter.ReduceOps):  # type: ignore[misc]  # Triton ships no types
    """`tl.reduce` that decodes bfloat16 where stock takes a shortcut through numpy."""

    def apply_impl(self, input: tuple[Any, ...]) -> Any:
        if not _is_bf16(input[0]):
            return super().apply_impl(input)
        if _combines(self.combine_fn, ("_sum_combine",)):
            return self._sum(input[0])
        if _combines(self.combine_fn, _INDEXED):
            value, index = super().apply_impl((_widened(input[0]), *input[1:]))
            return _narrowed(value), index
        if _combines(self.combine_fn, _EXTREME):
            return _narrowed(super().apply_impl((_widened(input[0]), *input[1:])))
        return self.generic_reduce(input)

    def _sum(self, tensor: Any) -> Any:
        values = values_of(tensor.handle)
        total = rounded_sum(values, self.axis)
        if self.keep_dims:
            total = np.expand_dims(total, self.axis) if self.axis is not None else total.reshape((1,) * values.ndim)
        return self.to_tensor(BF16.encode(total), tl.bfloat16)


class ScanOps(interpreter.ScanOps):  # type: ignore[misc]  # Triton ships no types
    """`tl.associative_scan` that decodes bfloat16 where stock takes a shortcut through numpy."""

    def cumsum(self, input: Any) -> list[Any]:
        return self._scan(input, np.add) if _is_bf16(input) else super().cumsum(input)

    def cumprod(self, input: Any) -> list[Any]:
        return self._scan(input, np.multiply) if _is_bf16(input) else super().cumprod(input)

    def _scan(self, tensor: Any, op: np.ufunc) -> list[Any]:
        values = np.moveaxis(values_of(tensor.handle), self.axis, 0).copy()
        for row in range(1, values.shape[0]):
            values[row] = _rounded(op(values[row - 1], values[row]))
        return [self.to_tensor(BF16.encode(np.moveaxis(values, 0, self.axis)), tl.bfloat16)]
