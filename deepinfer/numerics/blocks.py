"""Block quantisation: groups of consecutive elements of the last dimension share one scale byte.

Three formats, each exact in float32 (float64 inputs are rounded to float32 first):

========== ======== ============= ===========================================================
name       elements scale         rule
========== ======== ============= ===========================================================
fp8        E4M3     UE8M0, per 32 ``s = 2^ceil(log2(max(amax, 1e-4) / 448))``, ``RNE(x / s)``
mxfp4      E2M1     UE8M0, per 32 ``s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))``, ``RNE(x / s)``
fp4_e4m3   E2M1     E4M3, per 16  ``s = e4m3(min(max(amax, 6 * 2^-9) * fp32(1/6), 448))``,
                                  ``RNE(x * fp32(1 / s))``
========== ======== ============= ===========================================================

The scale is fixed first and elements are divided by the stored one, never by an unrounded one.

What is not finite stays in its own block. A NaN makes the scale code NaN (UE8M0 255, E4M3 0x7F), so the whole block
decodes to NaN; its element bytes are then 0x7F in fp8 and code 0 in the 4-bit formats. An infinity does the same
where the scale is UE8M0. Where it is E4M3 the rule saturates: everything beyond 6 * 448 = 2688, infinities included,
decodes to +-2688. A power-of-two block whose maximum is within one rounding of the largest float32 may decode to an
infinity, as the format's value lies outside float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.numerics._tensors import as_float32, check_scales, split_blocks
from deepinfer.numerics.e2m1 import E2M1_MAX, decode_e2m1_pairs, encode_e2m1, pack_nibbles
from deepinfer.numerics.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from deepinfer.numerics.e8m0 import ceil_power_code, decode_e8m0

FP8_GROUP = 32
MXFP4_GROUP = 32
FP4_E4M3_GROUP = 16

ACTIVATION_AMAX_FLOOR = 1e-4
"""Floor of the block maximum for activations and window records."""

SMALLEST_NORMAL = 2.0**-126
FP8_WEIGHT_AMAX_FLOOR = E4M3_MAX * SMALLEST_NORMAL
"""Floor for fp8 weights: zero blocks get the scale 2^-126, a normal float32 on every machine."""

MXFP4_AMAX_FLOOR = E2M1_MAX * SMALLEST_NORMAL
FP4_E4M3_AMAX_FLOOR = E2M1_MAX * 2.0**-9
ONE_SIXTH = 11184811 / 2**26
"""fp32(1/6), exactly."""


class QuantisedBlocks(NamedTuple):
    """Element bytes and scale bytes of block-quantised rows.

    Attributes:
        codes: uint8 ``[..., width]`` for fp8, ``[..., width / 2]`` (packed nibbles) for the 4-bit formats.
        scales: uint8 ``[..., width / group]``.
    """

    codes: Tensor
    scales: Tensor


def power_scale_codes(amax: Tensor, element_max: float, amax_floor: float) -> Tensor:
    """Returns UE8M0 codes of ``2^ceil(log2(max(amax, amax_floor) / element_max))``, so that nothing is ever clipped."""
    # A tensor divisor, because a GPU divides by a Python number as a multiplication with its rounded reciprocal. The
    # correctly rounded quotient by 448 or 6 passes a power of two exactly when the real quotient does.
    divisor = torch.full((), element_max, dtype=torch.float32, device=amax.device)
    return ceil_power_code(amax.clamp(min=amax_floor) / divisor)


def quantise_fp8_blocks(
    x: Tensor, group: int = FP8_GROUP, *, amax_floor: float = ACTIVATION_AMAX_FLOOR
) -> QuantisedBlocks:
    """Quantises ``x [..., width]`` to E4M3 codes with one UE8M0 scale per ``group`` elements.

    Raises:
        ArgumentError: if the width is not a multiple of ``group`` or the dtype is not a supported float.
    """
    blocks = split_blocks(as_float32(x, "quantise_fp8_blocks"), group, "quantise_fp8_blocks")
    scales = power_scale_codes(blocks.abs().amax(-1), E4M3_MAX, amax_floor)
    codes = encode_e4m3(blocks / decode_e8m0(scales).unsqueeze(-1))
    return QuantisedBlocks(codes.flatten(-2), scales)


def dequantise_fp8_blocks(codes: Tensor, scales: Tensor, group: int = FP8_GROUP) -> Tensor:
    """Returns float32 ``[..., width]`` from E4M3 codes (uint8 or float8_e4m3fn) and UE8M0 scales.

    Raises:
        ArgumentError: if there is not exactly one scale per ``group`` codes.
    """
    blocks = split_blocks(decode_e4m3(codes), group, "dequantise_fp8_blocks")
    check_scales(scales, blocks, "dequantise_fp8_blocks")
    return (blocks * decode_e8m0(scales).unsqueeze(-1)).flatten(-2)


def quantise_mxfp4_blocks(x: Tensor, group: int = MXFP4_GROUP) -> QuantisedBlocks:
    """Quantises ``x [..., width]`` to packed E2M1 codes with one UE8M0 scale per ``group`` elements.

    Raises:
        ArgumentError: if the width is not a multiple of ``group``, is odd, or the dtype is not a supported float.
    """
    blocks = split_blocks(as_float32(x, "quantise_mxfp4_blocks"), group, "quantise_mxfp4_blocks")
    scales = power_scale_codes(blocks.abs().amax(-1), E2M1_MAX, MXFP4_AMAX_FLOOR)
    codes = encode_e2m1(blocks / decode_e8m0(scales).unsqueeze(-1))
    return QuantisedBlocks(pack_nibbles(codes.flatten(-2)), scales)


def dequantise_mxfp4_blocks(packed: Tensor, scales: Tensor, group: int = MXFP4_GROUP) -> Tensor:
    """Returns float32 ``[..., width]`` from packed E2M1 codes (uint8, int8 or float4_e2m1fn_x2) and UE8M0 scales.

    Raises:
        ArgumentError: if there is not exactly one scale per ``group`` codes.
    """
    blocks = split_blocks(decode_e2m1_pairs(packed), group, "dequantise_mxfp4_blocks")
    check_scales(scales, blocks, "dequantise_mxfp4_blocks")
    return (blocks * decode_e8m0(scales).unsqueeze(-1)).flatten(-2)


def quantise_fp4_e4m3_blocks(x: Tensor, group: int = FP4_E4M3_GROUP) -> QuantisedBlocks:
    """Quantises ``x [..., width]`` to packed E2M1 codes with one E4M3 scale per ``group`` elements.

    Elements are multiplied with the rounded reciprocal of the scale, not divided by it: the two differ where the
    scale's mantissa is 1.875 and the quotient is a tie.

    Raises:
        ArgumentError: if the width is not a multiple of ``group``, is odd, or the dtype is not a supported float.
    """
    blocks = split_blocks(as_float32(x, "quantise_fp4_e4m3_blocks"), group, "quantise_fp4_e4m3_blocks")
    amax = blocks.abs().amax(-1)
    # The encoding saturates at 448, which is the rule's minimum with 448.
    scales = encode_e4m3(amax.clamp(min=FP4_E4M3_AMAX_FLOOR) * ONE_SIXTH)
    reciprocals = decode_e4m3(scales).reciprocal()
    codes = encode_e2m1(blocks * reciprocals.unsqueeze(-1))
    return QuantisedBlocks(pack_nibbles(codes.flatten(-2)), scales)


def dequantise_fp4_e4m3_blocks(packed: Tensor, scales: Tensor, group: int = FP4_E4M3_GROUP) -> Tensor:
    """Returns float32 ``[..., width]`` from packed E2M1 codes and E4M3 scales (uint8 or float8_e4m3fn).

    Raises:
        ArgumentError: if there is not exactly one scale per ``group`` codes.
    """
    blocks = split_blocks(decode_e2m1_pairs(packed), group, "dequantise_fp4_e4m3_blocks")
    check_scales(scales, blocks, "dequantise_fp4_e4m3_blocks")
    return (blocks * decode_e4m3(scales).unsqueeze(-1)).flatten(-2)
