"""Small floating-point formats in numpy: decode exactly, encode as NVIDIA's conversion instructions do.

The interpreter keeps bfloat16 as uint16 and the 8-bit formats as uint8. Compiled kernels convert with
``cvt.rn.bf16`` and ``cvt.rn.satfinite.{e4m3,e5m2}x2`` (read from the PTX that Triton 3.9.0 emits for sm_90a and
sm_100a): nearest, ties to even; the 8-bit formats saturate, infinities too, E5M2 included; every NaN becomes one code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class SmallFloat:
    """A sign, ``exponent_bits`` and ``mantissa_bits``; codes above ``largest_code`` are not results of arithmetic.

    Attributes:
        name: as Triton spells the type.
        largest_code: what overflow gives: the largest finite value, or infinity where the format does not saturate.
        nan_code: the code that every NaN becomes.
        infinity_code: the code of infinity, or ``None``.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest_code: int
    nan_code: int
    infinity_code: int | None

    @property
    def bits(self) -> int:
        """Of a whole code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def code_dtype(self) -> type[np.unsignedinteger[Any]]:
        """How the interpreter stores codes."""
        return np.uint16 if self.bits == 16 else np.uint8

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal number, and of the spacing of the subnormal ones."""
        return 2 - (1 << (self.exponent_bits - 1))

    def decode(self, codes: Array) -> Array:
        """Returns the exact float32 values of codes."""
        if self.bits == 16:
            return (np.ascontiguousarray(codes).astype(np.uint32) << 16).view(np.float32).reshape(np.shape(codes))
        return _TABLES[self.name][codes]

    def encode(self, values: Array, *, toward_zero: bool = False) -> Array:
        """Returns the codes of floating-point or integer values, rounded once."""
        if values.dtype.kind in "iub":
            # 64 mantissa bits hold every integer: float64 would round twice.
            values = values.astype(np.longdouble if values.dtype.itemsize == 8 else np.float64)
        magnitude = np.abs(values)
        finite = np.isfinite(values)
        magnitude = np.where(finite, magnitude, 0)
        exponent = np.maximum(np.frexp(magnitude)[1] - 1, self.smallest_exponent)
        exponent = np.where(magnitude == 0, self.smallest_exponent, exponent)  # frexp says 0 for zero
        scaled = np.ldexp(magnitude, self.mantissa_bits - exponent)
        steps = np.trunc(scaled) if toward_zero else np.rint(scaled)
        # Of a normal number `steps` holds the hidden bit, which adds one to the exponent field, as it must; a carry
        # out of the mantissa does the same once more.
        codes = ((exponent - self.smallest_exponent).astype(np.int64) << self.mantissa_bits) + steps.astype(np.int64)
        codes = np.minimum(codes, self.largest_code)
        codes = np.where(finite, codes, self.largest_code)
        codes = codes | (np.signbit(values).astype(np.int64) << (self.bits - 1))
        codes = np.where(np.isnan(values), self.nan_code, codes)
        return codes.astype(self.code_dtype)


BF16 = SmallFloat("bf16", 8, 7, largest_code=0x7F80, nan_code=0x7FFF, infinity_code=0x7F80)
E4M3 = SmallFloat("fp8e4nv", 4, 3, largest_code=0x7E, nan_code=0x7F, infinity_code=None)
E5M2 = SmallFloat("fp8e5", 5, 2, largest_code=0x7B, nan_code=0x7F, infinity_code=0x7C)


def _table(small: SmallFloat) -> Array:
    codes = np.arange(256)
    field, mantissa = (codes & 0x7F) >> small.mantissa_bits, codes & ((1 << small.mantissa_bits) - 1)
    hidden = np.where(field > 0, 1 << small.mantissa_bits, 0)
    exponent = np.maximum(field, 1) - 1 + small.smallest_exponent - small.mantissa_bits
    values = np.ldexp((hidden + mantissa).astype(np.float32), exponent)
    above = (codes & 0x7F) > small.largest_code
    values = np.where(above, np.float32(np.nan), values)
    if small.infinity_code is not None:
        values = np.where((codes & 0x7F) == small.infinity_code, np.float32(np.inf), values)
    return np.where(codes & 0x80, -values, values).astype(np.float32)


_TABLES = {small.name: _table(small) for small in (E4M3, E5M2)}
_BY_NAME = {small.name: small for small in (BF16, E4M3, E5M2)}


def small_float_of(dtype: tl.dtype) -> SmallFloat | None:
    """The format that the interpreter keeps as integers under this Triton type, or ``None`` for other types."""
    return _BY_NAME.get(str(dtype.scalar))


def decode_e8m0(codes: Array) -> Array:
    """Returns the float32 scales of E8M0 bytes: ``2**(code - 127)``, 255 is NaN."""
    powers = np.ldexp(np.float32(1), codes.view(np.uint8).astype(np.int32) - 127)
    return np.where(codes.view(np.uint8) == 255, np.float32(np.nan), powers).astype(np.float32)


def truncate_to_tf32(values: Array) -> Array:
    """Drops the 13 lowest bits of float32: Triton hands float32 to ``mma.tf32`` as it is, which does not read them."""
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
