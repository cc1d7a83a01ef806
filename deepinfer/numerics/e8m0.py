"""UE8M0 scale codes: code c in 0..254 is the power of two 2^(c - 127), code 255 is NaN.

Everything here works on the bits of float32. A float ``log2`` returns the neighbouring code just above a power of
two, and shifting a code into the exponent without the cases 0 (2^-127 is subnormal in float32) and 255 gives 0 and
infinity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.numerics._tensors import as_float32, as_uint8

NAN_CODE = 255
LARGEST_CODE = 254

_MANTISSA_BITS = 23
_HALF_MANTISSA = 1 << (_MANTISSA_BITS - 1)
_FULL_MANTISSA = (1 << _MANTISSA_BITS) - 1


def _power_codes(x: Tensor, carry: int, largest_zero_bits: int) -> Tensor:
    """Rounds on bits: adding ``carry`` to the mantissa moves the exponent up exactly when it must be rounded up.

    Below 2^-126 the exponent field does not move in steps of one power, so code 0 is decided by comparison.
    """
    bits = x.view(torch.int32)
    codes = ((bits + carry) >> _MANTISSA_BITS).clamp(max=LARGEST_CODE).masked_fill(bits <= largest_zero_bits, 0)
    has_power = (x >= 0) & (x < math.inf)
    return codes.masked_fill(~has_power, NAN_CODE).to(torch.uint8)


def encode_e8m0(x: Tensor) -> Tensor:
    """Returns the uint8 code of the power of two nearest to each value; exact powers give their own code.

    A value half way between two powers takes the larger one. Zero (of either sign) and everything below 1.5 * 2^-127
    give code 0, finite values above 2^127 give code 254. NaN, infinities and negative values have no finite scale and
    give 255 (NaN), so they are never laundered into one. float64 is rounded to float32 first.
    """
    # The bits of 1.5 * 2^-127, half way between codes 0 and 1, are _HALF_MANTISSA * 1.5.
    largest_zero_bits = _HALF_MANTISSA + _HALF_MANTISSA // 2 - 1
    return _power_codes(as_float32(x, "encode_e8m0"), _HALF_MANTISSA, largest_zero_bits)


def ceil_power_code(v: Tensor) -> Tensor:
    """Returns the uint8 code of ``2^ceil(log2 v)``, the smallest power of two that is not below ``v``.

    Zero (of either sign) and everything up to 2^-127 give code 0, finite values above 2^127 give code 254. NaN,
    infinities and negative values give 255 (NaN). float64 is rounded to float32 first.
    """
    # The bits of 2^-127, the largest value of code 0, are _HALF_MANTISSA.
    return _power_codes(as_float32(v, "ceil_power_code"), _FULL_MANTISSA, _HALF_MANTISSA)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Returns float32 ``2^(c - 127)`` for codes 0..254 and NaN for 255; takes uint8 or ``float8_e8m0fnu``."""
    return as_uint8(codes, "decode_e8m0", torch.float8_e8m0fnu).view(torch.float8_e8m0fnu).to(torch.float32)
