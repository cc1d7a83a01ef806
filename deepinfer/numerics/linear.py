"""Quantised weights as a checkpoint stores them, and back.

Dequantising takes the dtypes that safetensors gives (``float8_e4m3fn``, ``int8``, ``float8_e8m0fnu``) as well as the
same bytes in uint8, and returns float32. Quantising returns the checkpoint dtypes. Scales are powers of two rounded up,
so no value is clipped; a block with a NaN or an infinity becomes NaN.

Shape letters: N output rows, K input columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.errors import ArgumentError
from deepinfer.numerics._tensors import as_float32
from deepinfer.numerics.blocks import (
    FP8_GROUP,
    FP8_WEIGHT_AMAX_FLOOR,
    dequantise_fp8_blocks,
    dequantise_mxfp4_blocks,
    power_scale_codes,
    quantise_fp8_blocks,
    quantise_mxfp4_blocks,
)
from deepinfer.numerics.e4m3 import E4M3_MAX, decode_e4m3, encode_e4m3
from deepinfer.numerics.e8m0 import decode_e8m0

WEIGHT_BLOCK = 32


class QuantisedWeight(NamedTuple):
    """A weight and its scales in checkpoint dtypes.

    Attributes:
        weight: ``float8_e4m3fn``, or int8 with two E2M1 codes per byte.
        scale: ``float8_e8m0fnu``.
    """

    weight: Tensor
    scale: Tensor


def _blocks_over(size: int) -> int:
    return -(-size // WEIGHT_BLOCK)


def _check_matrix(matrix: Tensor, what: str) -> None:
    if matrix.dim() < 2:
        raise ArgumentError(what, [f"weight has shape {tuple(matrix.shape)}; give [..., N, K]"])


def quantise_fp8_weight(weight_NK: Tensor) -> QuantisedWeight:
    """Quantises ``[..., N, K]`` to E4M3 with one UE8M0 scale per block of 32 x 32; the last blocks may be ragged.

    Returns:
        ``float8_e4m3fn [..., N, K]`` and ``float8_e8m0fnu [..., ceil(N / 32), ceil(K / 32)]``.

    Raises:
        ArgumentError: if the input is not a float matrix.
    """
    _check_matrix(weight_NK, "quantise_fp8_weight")
    weight_NK = as_float32(weight_NK, "quantise_fp8_weight")
    rows, columns = weight_NK.shape[-2:]
    row_blocks, column_blocks = _blocks_over(rows), _blocks_over(columns)
    padded = pad(weight_NK, (0, column_blocks * WEIGHT_BLOCK - columns, 0, row_blocks * WEIGHT_BLOCK - rows))
    blocks = padded.reshape(*weight_NK.shape[:-2], row_blocks, WEIGHT_BLOCK, column_blocks, WEIGHT_BLOCK)
    scales = power_scale_codes(blocks.abs().amax((-1, -3)), E4M3_MAX, FP8_WEIGHT_AMAX_FLOOR)
    codes = encode_e4m3(blocks / decode_e8m0(scales).unsqueeze(-1).unsqueeze(-3))
    codes = codes.flatten(-2).flatten(-3, -2)[..., :rows, :columns].contiguous()
    return QuantisedWeight(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu))


def dequantise_fp8_weight(weight_NK: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 ``[..., N, K]`` from E4M3 codes and UE8M0 scales ``[..., ceil(N / 32), ceil(K / 32)]``.

    Raises:
        ArgumentError: if the scales are not exactly one per 32 x 32 block.
    """
    _check_matrix(weight_NK, "dequantise_fp8_weight")
    rows, columns = weight_NK.shape[-2:]
    needed = (*weight_NK.shape[:-2], _blocks_over(rows), _blocks_over(columns))
    if tuple(scale.shape) != needed:
        problem = f"scale has shape {tuple(scale.shape)}; weight {tuple(weight_NK.shape)} needs {needed}"
        raise ArgumentError("dequantise_fp8_weight", [problem])
    scale_NK = decode_e8m0(scale).repeat_interleave(WEIGHT_BLOCK, -2).repeat_interleave(WEIGHT_BLOCK, -1)
    return decode_e4m3(weight_NK) * scale_NK[..., :rows, :columns]


def quantise_mxfp4_weight(weight_NK: Tensor) -> QuantisedWeight:
    """Quantises ``[..., N, K]`` to E2M1 with one UE8M0 scale per row per 32 columns.

    Returns:
        int8 ``[..., N, K / 2]`` (even column in the low nibble) and ``float8_e8m0fnu [..., N, K / 32]``.

    Raises:
        ArgumentError: if K is not a multiple of 32 or the input is not a float matrix.
    """
    _check_matrix(weight_NK, "quantise_mxfp4_weight")
    quantised = quantise_mxfp4_blocks(weight_NK)
    return QuantisedWeight(quantised.codes.view(torch.int8), quantised.scales.view(torch.float8_e8m0fnu))


def dequantise_mxfp4_weight(packed: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 ``[..., N, K]`` from bytes ``[..., N, K / 2]`` and UE8M0 scales ``[..., N, K / 32]``.

    The ratio of the two stored widths is 16 because of the packing; the group is 32.

    Raises:
        ArgumentError: if the scales are not exactly one per row per 32 columns.
    """
    _check_matrix(packed, "dequantise_mxfp4_weight")
    return dequantise_mxfp4_blocks(packed, scale)


def quantise_engram_table(table: Tensor) -> QuantisedWeight:
    """Quantises rows ``[..., width]`` to E4M3 with one UE8M0 scale per row per 32 columns.

    Returns:
        ``float8_e4m3fn [..., width]`` and ``float8_e8m0fnu [..., width / 32]``.

    Raises:
        ArgumentError: if the width is not a multiple of 32 or the dtype is not a supported float.
    """
    quantised = quantise_fp8_blocks(table, FP8_GROUP, amax_floor=FP8_WEIGHT_AMAX_FLOOR)
    return QuantisedWeight(quantised.codes.view(torch.float8_e4m3fn), quantised.scales.view(torch.float8_e8m0fnu))


def dequantise_engram_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """Returns float32 ``[..., width]`` from looked-up table rows and their scales ``[..., width / 32]``.

    The values have four mantissa bits, so a bfloat16 copy of normal numbers is exact.

    Raises:
        ArgumentError: if the scales are not exactly one per row per 32 columns.
    """
    return dequantise_fp8_blocks(rows, scale)
