"""Number formats on the bits of float32, for use inside kernels; they equal `deepinfer.numerics` exactly.

No division, no logarithm, no conversion instruction: their last bit differs between machines, integers do not. Maxima
of magnitudes are maxima of their bits, in which infinity lies above every number and NaN above infinity.

Legend: G blocks of a row, L elements of a block.
"""

from __future__ import annotations

import triton.language as tl

from deepinfer_triton.jit import device_function

INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
MANTISSA_BITS = tl.constexpr(0x7FFFFF)

FP8_FLOOR_BITS = tl.constexpr(0x38D1B717)
"""float32(1e-4), the floor of an activation block's maximum."""

FP8_MANTISSA = tl.constexpr(0x600000)
"""Mantissa of 448 = 1.75 * 2^8: above it the quotient by 448 passes a power of two."""

FP4_FLOOR_BITS = tl.constexpr(0x01C00000)
"""6 * 2^-126."""

FP4_MANTISSA = tl.constexpr(0x400000)
"""Mantissa of 6 = 1.5 * 2^2."""

LONG_RANGE_FLOOR_BITS = tl.constexpr(0x3C400000)
"""6 * 2^-9."""

ONE_SIXTH = tl.constexpr(11184811 / 2**26)
"""float32(1/6), exactly."""

E4M3_SMALLEST_NORMAL = tl.constexpr(0x3C800000)
E4M3_REBIAS = tl.constexpr(120 << 3)
E4M3_LARGEST = tl.constexpr(0x7E)
E4M3_NAN = tl.constexpr(0x7F)
E8M0_NAN = tl.constexpr(255)
SUBNORMAL_CARRIER = tl.constexpr(16384.0)
"""Adding it to less than 2^-6 rounds to multiples of 2^-9, the steps of subnormal e4m3."""

SUBNORMAL_CARRIER_BITS = tl.constexpr(0x46800000)
SUBNORMAL_STEP = tl.constexpr(2.0**-9)


@device_function
def bits_of(x: tl.tensor) -> tl.tensor:
    """Return the bits of float32 values as int32."""
    return x.to(tl.int32, bitcast=True)


@device_function
def float_of(bits: tl.tensor) -> tl.tensor:
    """Return the float32 values of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@device_function
def order_keys(scores: tl.tensor) -> tl.tensor:
    """Return int32 that are ordered as float32 scores: NaN below every number, -0 equal to +0, -2^31 never used."""
    bits = bits_of(tl.where(scores == 0.0, 0.0, scores))
    keys = tl.where(bits < 0, bits ^ MAGNITUDE_BITS, bits)
    return tl.where(scores != scores, -MAGNITUDE_BITS, keys)


@device_function
def e8m0_value(code: tl.tensor) -> tl.tensor:
    """Return 2^(code - 127); code 0 is subnormal in float32, 255 is NaN."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return float_of(tl.where(code == E8M0_NAN, NAN_BITS, bits))


@device_function
def e4m3_value(code: tl.tensor) -> tl.tensor:
    """Return the float32 values of int32 e4m3 codes."""
    magnitude = code & 0x7F
    normal = float_of((magnitude << 20) + (120 << 23))
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * SUBNORMAL_STEP, normal)
    bits = tl.where(magnitude == E4M3_NAN, NAN_BITS, bits_of(value))
    return float_of(bits | ((code & 0x80) << 24))


@device_function
def e2m1_value(code: tl.tensor) -> tl.tensor:
    """Return the float32 values of int32 e2m1 codes; only the low four bits are read."""
    magnitude = code & 7
    normal = float_of((magnitude << 22) + (126 << 23))
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return float_of(bits_of(value) | ((code & 8) << 28))


@device_function
def e2m1_codes(x: tl.tensor, magnitude: tl.tensor) -> tl.tensor:
    """Return codes of scaled magnitudes: nearest, ties to the even code, saturating; signs are those of ``x``."""
    code = tl.where(magnitude > 0.25, 1, 0)
    code = tl.where(magnitude >= 0.75, 2, code)
    code = tl.where(magnitude > 1.25, 3, code)
    code = tl.where(magnitude >= 1.75, 4, code)
    code = tl.where(magnitude > 2.5, 5, code)
    code = tl.where(magnitude >= 3.5, 6, code)
    code = tl.where(magnitude > 5.0, 7, code)
    return code | ((bits_of(x) >> 28) & 8)


@device_function
def largest_magnitude(x_GL: tl.tensor) -> tl.tensor:
    """Return the bits of each block's largest magnitude."""
    return tl.max(bits_of(x_GL) & MAGNITUDE_BITS, 1)


@device_function
def power_scale(largest_G: tl.tensor, FLOOR: tl.constexpr, MANTISSA: tl.constexpr, SHIFT: tl.constexpr) -> tl.tensor:
    """Return e8m0 codes, before NaN is considered: exponent of ``2^ceil(log2(max(largest, floor) / m))``.

    ``m`` is the format's largest value, with the given mantissa and exponent ``SHIFT``.
    """
    floored = tl.maximum(largest_G, FLOOR)
    return (floored >> 23) - SHIFT + ((floored & MANTISSA_BITS) > MANTISSA).to(tl.int32)


@device_function
def inverse_power(code: tl.tensor) -> tl.tensor:
    """Return 2^(127 - code); codes of :func:`power_scale` are 1 .. 253, so that this is a normal number."""
    return float_of((254 - code) << 23)


@device_function
def fp8_scales(largest_G: tl.tensor) -> tl.tensor:
    """Return e8m0 codes of fp8 blocks, before NaN is considered."""
    return power_scale(largest_G, FP8_FLOOR_BITS, FP8_MANTISSA, 8)


@device_function
def mxfp4_scales(largest_G: tl.tensor) -> tl.tensor:
    """Return e8m0 codes of mxfp4 blocks, before NaN is considered."""
    return power_scale(largest_G, FP4_FLOOR_BITS, FP4_MANTISSA, 2)


@device_function
def fp8_codes(x_GL: tl.tensor, scale_G: tl.tensor, finite_G: tl.tensor) -> tl.tensor:
    """Return e4m3 codes of ``x / 2^(scale - 127)``; all NaN in blocks that are not finite."""
    magnitude = float_of(bits_of(x_GL) & MAGNITUDE_BITS) * inverse_power(scale_G)[:, None]
    bits = bits_of(magnitude)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - E4M3_REBIAS
    # A power of two times x is exact, so that fusing this sum with that product changes nothing.
    subnormal = bits_of(magnitude + SUBNORMAL_CARRIER) - SUBNORMAL_CARRIER_BITS
    code = tl.where(bits < E4M3_SMALLEST_NORMAL, subnormal, normal) | ((bits_of(x_GL) >> 24) & 0x80)
    return tl.where(finite_G[:, None], code, E4M3_NAN)


@device_function
def long_range_scales(largest_G: tl.tensor) -> tl.tensor:
    """Return e4m3 codes of ``max(largest, floor) / 6``; 0x7F where the block holds NaN, saturating at 448."""
    scaled = float_of(tl.maximum(largest_G, LONG_RANGE_FLOOR_BITS)) * ONE_SIXTH
    bits = bits_of(scaled)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - E4M3_REBIAS
    # Comparisons, because a sum could be fused with the product above and be rounded once instead of twice.
    subnormal = tl.where(scaled >= 1.5 * 2.0**-9, 2, 1)
    subnormal = tl.where(scaled > 2.5 * 2.0**-9, 3, subnormal)
    subnormal = tl.where(scaled >= 3.5 * 2.0**-9, 4, subnormal)
    subnormal = tl.where(scaled > 4.5 * 2.0**-9, 5, subnormal)
    subnormal = tl.where(scaled >= 5.5 * 2.0**-9, 6, subnormal)
    subnormal = tl.where(scaled > 6.5 * 2.0**-9, 7, subnormal)
    subnormal = tl.where(scaled >= 7.5 * 2.0**-9, 8, subnormal)
    code = tl.where(bits < E4M3_SMALLEST_NORMAL, subnormal, tl.minimum(normal, E4M3_LARGEST))
    return tl.where(largest_G > INFINITY_BITS, E4M3_NAN, code)


@device_function
def rounded_reciprocal(scale: tl.tensor) -> tl.tensor:
    """Return float32(1 / s) of e4m3 values s > 0: there are eight mantissas, and powers of two are exact."""
    bits = bits_of(scale)
    mantissa = (bits >> 20) & 7
    root = tl.where(mantissa == 0, 1.0, 8.0 / 9.0)
    root = tl.where(mantissa == 2, 0.8, root)
    root = tl.where(mantissa == 3, 8.0 / 11.0, root)
    root = tl.where(mantissa == 4, 8.0 / 12.0, root)
    root = tl.where(mantissa == 5, 8.0 / 13.0, root)
    root = tl.where(mantissa == 6, 8.0 / 14.0, root)
    root = tl.where(mantissa == 7, 8.0 / 15.0, root)
    return root * float_of((254 - (bits >> 23)) << 23)
