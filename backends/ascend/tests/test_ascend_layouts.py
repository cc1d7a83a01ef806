"""Layouts move bytes without rounding, and back."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator.weights import StoredWeight
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import (
    decode_e4m3,
    decode_e8m0,
    dequantise_fp8_weight,
    dequantise_mxfp4_weight,
    quantise_fp8_weight,
    quantise_mxfp4_weight,
)
from deepinfer_ascend import layouts

SHAPES = [(32, 64), (33, 96), (64, 32), (70, 160), (1, 128)]


def stored(rows, columns, stored_format):
    values_NK = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    quantise = quantise_mxfp4_weight if stored_format == "mxfp4" else quantise_fp8_weight
    weight, scale = quantise(values_NK)
    return StoredWeight("w", stored_format, weight, scale, rows, columns)


def decoded(weight, columns):
    """Return the float32 values of mxfp8 data without its padding."""
    scale_NK = decode_e8m0(weight.scales_NG).repeat_interleave(32, dim=-1)
    return (decode_e4m3(weight.codes) * scale_NK)[:, :columns]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_block_scaled_fp8_is_mxfp8_of_the_same_values(rows, columns):
    weight = stored(rows, columns, "fp8_block32")
    made = layouts.mx_weight(weight)
    assert made.in_features % 64 == 0
    assert torch.equal(decoded(made, columns), dequantise_fp8_weight(weight.weight, weight.scale))
    blocks = layouts.blocks_of_rows(made.scales_NG)[:, : weight.scale.shape[1]]
    assert torch.equal(blocks, weight.scale.view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_mxfp4_widens_to_mxfp8_of_the_same_values_and_back(rows, columns):
    weight = stored(rows, columns, "mxfp4")
    made = layouts.mx_weight(weight)
    wide = layouts.widened(made)
    assert torch.equal(decoded(wide, columns), dequantise_mxfp4_weight(weight.weight, weight.scale))
    back = layouts.narrowed(wide)
    assert torch.equal(back.codes, made.codes)
    assert back.is_fp4


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_pairs_of_scales_come_back(groups):
    scales = torch.randint(0, 255, (5, 7, groups)).to(torch.uint8)
    pairs = layouts.paired(scales)
    assert pairs.shape == (5, 7, (groups + 1) // 2, 2)
    assert torch.equal(layouts.unpaired(pairs, groups), scales)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_operands_lie_in_plain_order_and_come_back(rows, columns):
    made = layouts.mx_weight(stored(rows, columns, "fp8_block32"))
    operand = layouts.matmul_operand(made)
    assert operand.codes.stride() == (rows, 1)
    # Also with K = 64, where an axis has length one and a mere view would keep other strides.
    assert operand.scales.stride() == (2 * rows, 2, 1)
    back = layouts.mx_of_operand(operand, made.scales_NG.shape[1])
    assert torch.equal(back.codes, made.codes)
    assert torch.equal(back.scales_NG, made.scales_NG)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_nz_tiles_come_back(dtype):
    width = 32 // dtype.itemsize
    matrix = torch.arange(2 * 48 * 3 * width).view(2, 48, 3 * width).to(dtype)
    tiles = layouts.to_nz(matrix)
    assert tiles.shape == (2, 3, 3, 16, width)
    assert torch.equal(layouts.from_nz(tiles), matrix)
    # The first tile holds the first columns of the first sixteen rows.
    assert torch.equal(tiles[1, 0, 0], matrix[1, :16, :width])


def test_packed_codes_come_in_tiles_of_sixteen_bytes():
    matrix = torch.arange(32 * 48, dtype=torch.int32).view(32, 48).to(torch.uint8)
    tiles = layouts.to_nz(matrix, tile_bytes=layouts.NZ_FP4_BYTES)
    assert tiles.shape == (3, 2, 16, 16)
    assert torch.equal(tiles[2, 1], matrix[16:, 32:])
    assert torch.equal(layouts.from_nz(tiles), matrix)


def test_what_has_no_inverse_is_refused():
    with pytest.raises(OpRefusedError, match="differ within 32 rows"):
        layouts.blocks_of_rows(torch.arange(64, dtype=torch.uint8).view(32, 2))
    with pytest.raises(OpRefusedError, match="mxfp4 does not have"):
        layouts.narrowed(layouts.MxWeight(torch.tensor([[1, 2]], dtype=torch.uint8), torch.zeros(1, 1), is_fp4=False))
    with pytest.raises(OpRefusedError, match="does not fill them"):
        layouts.to_nz(torch.zeros(15, 32, dtype=torch.uint8))


def test_scales_of_another_shape_are_refused_with_both_shapes():
    weight = stored(64, 64, "fp8_block32")
    with pytest.raises(OpRefusedError, match=r"\(2, 2\)"):
        layouts.mx_weight(StoredWeight("w", "fp8_block32", weight.weight, weight.scale[:1], 64, 64))
