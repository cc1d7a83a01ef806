"""The interpreter's builder with the arithmetic of compiled kernels.

Stock Triton 3.9.0 computes on the bit patterns of bfloat16 as if they were integers, rounds towards zero, and reads
an 8-bit NaN as 480. Each override names what it repairs.
"""

# ruff: noqa: D102  # the methods are Triton's, and so are their contracts

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import min_dot_size
from triton.runtime import interpreter

from deepinfer_conformance.triton_cpu.errors import InterpretationError
from deepinfer_conformance.triton_cpu.formats import (
    BF16,
    Array,
    SmallFloat,
    decode_e8m0,
    small_float_of,
    truncate_to_tf32,
)

Handle = Any  # interpreter.TensorHandle; Triton ships no types
_LEGACY_FLOAT8 = ("fp8e4b8", "fp8e4b15", "fp8e5b16")


def values_of(handle: Handle) -> Array:
    """A handle's numbers: small formats decoded to float32, everything else as it is stored."""
    small = _small_float(handle.dtype)
    data: Array = handle.data
    return data if small is None else small.decode(data)


def handle_of(values: Array, dtype: tl.dtype) -> Handle:
    """A handle of a scalar type from numbers: encoded if the type is small, truth values as int1."""
    if values.dtype == np.bool_:
        # Stock keeps the operands' type on a comparison; the next operation would decode truth values as bfloat16.
        return interpreter.TensorHandle(values, tl.int1)
    small = _small_float(dtype)
    if small is not None:
        return interpreter.TensorHandle(small.encode(values), dtype.scalar)
    return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(dtype.scalar)), dtype.scalar)


def _small_float(dtype: tl.dtype) -> SmallFloat | None:
    if str(dtype.scalar) in _LEGACY_FLOAT8:
        raise InterpretationError(
            f"type {dtype.scalar} is not repaired, and the interpreter's own conversion rounds wrongly. "
            "Use fp8e4nv (torch.float8_e4m3fn) or fp8e5 (torch.float8_e5m2)"
        )
    return small_float_of(dtype)


def float_to_integer(values: Array, bits: int, *, signed: bool) -> Array:
    """``cvt.rzi`` as compiled kernels use it: towards zero, clamped to the register's width; NaN per the PTX manual."""
    register_bits = max(bits, 16)
    low = -(1 << (register_bits - 1)) if signed else 0
    high = (1 << (register_bits - 1)) - 1 if signed else (1 << register_bits) - 1
    for_nan = 0 if register_bits < 64 and values.dtype != np.float64 else 1 << (register_bits - 1)
    wide = np.trunc(values.astype(np.float64 if register_bits < 64 else np.longdouble))
    wide = np.clip(np.where(np.isnan(wide), 0, wide), low, high)
    integers = wide.astype(np.int64 if signed else np.uint64).view(np.uint64)
    return np.where(np.isnan(values), np.uint64(for_nan), integers)


class ArithmeticBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc]  # Triton ships no types
    """Casts, arithmetic and dots that agree with compiled code."""

    def __init__(self) -> None:
        super().__init__()
        # The formats and the smallest dots that the NVIDIA compiler accepts; stock accepts any.
        self.options = interpreter.InterpreterOptions(supported_fp8_dtypes=("fp8e5", "fp8e4nv"))
        self.codegen_fns["min_dot_size"] = min_dot_size(GPUTarget("cuda", 90, 32))

    # Casts: stock truncates to bfloat16, and converts integers to its bit patterns.

    def cast_impl(self, src: Handle, dst_type: tl.dtype) -> Handle:
        target = dst_type.scalar
        values = values_of(src)
        if values.dtype == np.bool_:
            values = values.astype(np.int8)
        if target.is_fp8() and (values.dtype == np.float64 or values.dtype.kind in "iu"):
            raise InterpretationError(f"{src.dtype.scalar} -> {target} does not compile: go through tl.float32")
        if target.is_int() and values.dtype.kind == "f":
            values = float_to_integer(values, target.int_bitwidth, signed=target.is_int_signed())
        return handle_of(values, target)

    def create_fp_to_fp(self, src: Handle, dst_type: tl.dtype, rounding_mode: Any) -> Handle:
        small = _small_float(dst_type)
        if rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            if small is None:
                return super().create_fp_to_fp(src, dst_type, rounding_mode)
            if small is not BF16:
                raise InterpretationError(f"rounding towards zero to {dst_type.scalar} does not compile; leave it out")
            return interpreter.TensorHandle(small.encode(values_of(src), toward_zero=True), dst_type.scalar)
        return self.cast_impl(src, dst_type)

    # Elementwise: stock computes on the codes of bfloat16.

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., Array]) -> Handle:
        dtype = lhs.dtype.scalar
        if _small_float(dtype) is not None:
            self._require_arithmetic(dtype)
            return handle_of(np.asarray(op(values_of(lhs), values_of(rhs))), dtype)
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result = interpreter.TensorHandle(result.data, tl.int1)
        return result

    def unary_op(self, arg: Handle, op: Callable[[Array], Array]) -> Handle:
        if _small_float(arg.dtype) is None:
            return super().unary_op(arg, op)
        self._require_arithmetic(arg.dtype)
        return handle_of(op(values_of(arg)), arg.dtype)

    def create_clampf(self, arg: Handle, lo: Handle, hi: Handle, propagate_nans: Any) -> Handle:
        if _small_float(arg.dtype) is None:
            return super().create_clampf(arg, lo, hi, propagate_nans)
        self._require_arithmetic(arg.dtype)
        wide = [interpreter.TensorHandle(values_of(item), tl.float32) for item in (arg, lo, hi)]
        return handle_of(super().create_clampf(*wide, propagate_nans).data, arg.dtype)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if _small_float(z.dtype) is None:
            return super().create_fma(x, y, z)
        self._require_arithmetic(z.dtype)
        # float64 holds the product exactly and the sum to far below half a unit of bfloat16.
        total = values_of(x).astype(np.float64) * values_of(y) + values_of(z)
        return handle_of(total, z.dtype)

    def create_erf(self, arg: Handle) -> Handle:
        return self._through_float32(super().create_erf, arg)

    def create_rsqrt(self, arg: Handle) -> Handle:
        return self._through_float32(super().create_rsqrt, arg)

    def _through_float32(self, create: Callable[[Handle], Handle], arg: Handle) -> Handle:
        if _small_float(arg.dtype) is None:
            return create(arg)
        self._require_arithmetic(arg.dtype)
        return handle_of(create(interpreter.TensorHandle(values_of(arg), tl.float32)).data, arg.dtype)

    @staticmethod
    def _require_arithmetic(dtype: tl.dtype) -> None:
        if dtype.scalar.is_fp8():
            raise InterpretationError(
                f"arithmetic and comparisons on {dtype.scalar} do not compile: convert with .to(tl.float32) first"
            )

    # Matrix products: stock multiplies the codes of bfloat16, and computes tf32 in full float32.

    def create_dot(self, a: Handle, b: Handle, d: Handle, input_precision: Any, max_num_imprecise_acc: Any) -> Handle:
        if not a.dtype.is_floating():
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        left, right = (self._dot_operand(item, input_precision) for item in (a, b))
        return handle_of(np.matmul(left, right) + values_of(d), d.dtype)

    @staticmethod
    def _dot_operand(handle: Handle, input_precision: Any) -> Array:
        values = values_of(handle)
        if values.dtype == np.float64:
            return values
        if handle.dtype.scalar.is_fp32() and input_precision == interpreter._ir.INPUT_PRECISION.TF32:
            return truncate_to_tf32(values)
        return values.astype(np.float32)

    def create_dot_scaled(
        self,
        lhs: Handle,
        lhs_scale_handle: Handle | None,
        lhs_format_enum: Any,
        rhs: Handle,
        rhs_scale_handle: Handle | None,
        rhs_format_enum: Any,
        fast_math: Any,  # noqa: ARG002  # Triton's signature
        lhs_k_pack: Any,
        rhs_k_pack: Any,
        acc_handle: Handle,
    ) -> Handle:
        """Stock reads E4M3 scales as powers of two and bfloat16 operands through float16."""
        left = _scaled_operand(lhs, lhs_scale_handle, lhs_format_enum, pack_axis=-1 if lhs_k_pack else -2)
        # The right operand is [K, N] but its scales are [N, K / group]: scaled transposed, along the last axis.
        right = _scaled_operand(
            rhs, rhs_scale_handle, rhs_format_enum, pack_axis=-2 if rhs_k_pack else -1, transposed=True
        )
        return interpreter.TensorHandle(np.matmul(left, right) + acc_handle.data, tl.float32)


def _scaled_operand(
    handle: Handle, scale: Handle | None, kind: Any, *, pack_axis: int, transposed: bool = False
) -> Array:
    if kind == interpreter._ir.ScaleDotElemTypeTY.E2M1:
        values: Array = interpreter._unpack_e2m1(handle.data, pack_axis)
    else:
        values = values_of(handle).astype(np.float32)
    if scale is None:
        return values
    factors = decode_e8m0(scale.data) if scale.dtype.is_int() else values_of(scale)
    group = values.shape[-2 if transposed else -1] // factors.shape[-1]
    factors = np.repeat(factors, group, axis=-1)
    scaled: Array = values * (np.swapaxes(factors, -1, -2) if transposed else factors)
    return scaled
