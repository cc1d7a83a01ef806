"""Quantised weights in checkpoint layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer.errors import ArgumentError
from deepinfer.numerics import (
    decode_e8m0,
    dequantise_engram_rows,
    dequantise_fp8_weight,
    dequantise_mxfp4_weight,
    quantise_engram_table,
    quantise_fp8_weight,
    quantise_mxfp4_weight,
)


def weight(*shape: int, seed: int = 6) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_fp8_scales_apply_to_their_own_32_by_32_block_with_ragged_edges() -> None:
    codes = torch.full((33, 65), 0x38, dtype=torch.uint8)
    scale = torch.tensor([[127, 128, 129], [130, 131, 132]], dtype=torch.uint8)
    decoded = dequantise_fp8_weight(codes, scale)
    assert decoded.dtype == torch.float32
    rows, columns = torch.arange(33) // 32, torch.arange(65) // 32
    expected = 2.0 ** (3 * rows.unsqueeze(-1) + columns)
    assert torch.equal(decoded, expected)


def test_mxfp4_golden_bytes() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4], dtype=torch.uint8)
    scale = torch.tensor([[127, 130]], dtype=torch.uint8)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    expected = torch.tensor([table * 2 + [8 * value for value in table] * 2])
    decoded = dequantise_mxfp4_weight(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu))
    assert torch.equal(decoded, expected)
    assert torch.equal(torch.signbit(decoded), torch.signbit(expected))
    quantised = quantise_mxfp4_weight(expected)
    assert torch.equal(quantised.weight.view(torch.uint8), packed)
    assert torch.equal(quantised.scale.view(torch.uint8), scale)


@pytest.mark.parametrize("shape", [(64, 96), (33, 65), (1, 1), (31, 32), (0, 64), (2, 40, 70)])
def test_fp8_weights_keep_their_shape_and_lose_half_a_step_of_the_block_at_most(shape: tuple[int, ...]) -> None:
    original = weight(*shape)
    quantised = quantise_fp8_weight(original)
    assert quantised.weight.dtype == torch.float8_e4m3fn
    assert quantised.scale.dtype == torch.float8_e8m0fnu
    assert quantised.weight.shape == shape
    assert quantised.scale.shape == (*shape[:-2], math.ceil(shape[-2] / 32), math.ceil(shape[-1] / 32))
    decoded = dequantise_fp8_weight(*quantised)
    # Three mantissa bits: half a step is 1/16 of the value; below the smallest normal it is 2^-10 scales.
    scale = decode_e8m0(quantised.scale).repeat_interleave(32, -2).repeat_interleave(32, -1)
    bound = torch.maximum(original.abs() / 16, scale[..., : shape[-2], : shape[-1]] * 2.0**-10)
    assert bool(((decoded - original).abs() <= bound).all())


def test_fp8_blocks_use_the_smallest_power_that_clips_nothing() -> None:
    original = torch.zeros(64, 64)
    original[3, 3], original[40, 3], original[3, 40] = 448.0, 449.0, -(2.0**-20)
    scale = quantise_fp8_weight(original).scale.view(torch.uint8)
    # 2^-20 / 448 lies between 2^-29 and 2^-28; a zero block takes 2^-126.
    assert scale.tolist() == [[127, 127 - 28], [128, 1]]
    assert dequantise_fp8_weight(*quantise_fp8_weight(original))[3].tolist() == original[3].tolist()


def test_mxfp4_weights_use_the_smallest_power_that_clips_nothing_per_row() -> None:
    original = torch.zeros(3, 64)
    original[0, 0], original[1, 0], original[2, 63] = 6.0, 6.0001, -(2.0**-20)
    scale = quantise_mxfp4_weight(original).scale.view(torch.uint8)
    assert scale.tolist() == [[127, 1], [128, 1], [1, 127 - 22]]


def test_engram_rows_are_quantised_per_32_columns_without_the_activation_floor() -> None:
    table = weight(7, 256)
    table[2, 32:64] *= 2.0**-30
    quantised = quantise_engram_table(table)
    assert quantised.weight.dtype == torch.float8_e4m3fn
    assert quantised.scale.shape == (7, 8)
    decoded = dequantise_engram_rows(*quantised)
    scale = decode_e8m0(quantised.scale).repeat_interleave(32, -1)
    assert bool(((decoded - table).abs() <= torch.maximum(table.abs() / 16, scale * 2.0**-10)).all())
    assert bool((decoded[2, 32:64] != 0).any())
    assert torch.equal(decoded.bfloat16().float(), decoded)


def test_gathered_engram_rows_decode_like_the_whole_table() -> None:
    quantised = quantise_engram_table(weight(7, 64))
    rows = torch.tensor([[3, 0], [6, 3]])
    codes, scale = quantised.weight.view(torch.uint8)[rows], quantised.scale.view(torch.uint8)[rows]
    assert torch.equal(dequantise_engram_rows(codes, scale), dequantise_engram_rows(*quantised)[rows])


def test_quantising_a_dequantised_weight_gives_the_same_values() -> None:
    original = weight(64, 96)
    once = dequantise_fp8_weight(*quantise_fp8_weight(original))
    assert torch.equal(dequantise_fp8_weight(*quantise_fp8_weight(once)), once)
    once = dequantise_mxfp4_weight(*quantise_mxfp4_weight(original))
    assert torch.equal(dequantise_mxfp4_weight(*quantise_mxfp4_weight(once)), once)


def test_uint8_codes_and_checkpoint_dtypes_decode_alike() -> None:
    fp8 = quantise_fp8_weight(weight(40, 64))
    assert torch.equal(
        dequantise_fp8_weight(fp8.weight.view(torch.uint8), fp8.scale.view(torch.uint8)), dequantise_fp8_weight(*fp8)
    )
    fp4 = quantise_mxfp4_weight(weight(40, 64))
    assert torch.equal(
        dequantise_mxfp4_weight(fp4.weight.view(torch.uint8), fp4.scale.view(torch.uint8)),
        dequantise_mxfp4_weight(*fp4),
    )


def test_strided_weights_quantise_like_dense_ones() -> None:
    original = weight(96, 128)
    for view in (original.T, original[::2, ::2], original[:1].expand(40, 128)):
        dense = view.clone(memory_format=torch.contiguous_format)
        for quantise in (quantise_fp8_weight, quantise_mxfp4_weight, quantise_engram_table):
            width = view.shape[-1] // 32 * 32
            left, right = quantise(view[:, :width]), quantise(dense[:, :width])
            assert torch.equal(left.weight.view(torch.uint8), right.weight.view(torch.uint8))
            assert torch.equal(left.scale.view(torch.uint8), right.scale.view(torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_makes_its_own_block_nan_only(bad: float) -> None:
    original = weight(64, 64)
    original[40, 2] = bad
    decoded = dequantise_fp8_weight(*quantise_fp8_weight(original))
    assert bool(decoded[32:, :32].isnan().all())
    assert decoded.isnan().sum().item() == 32 * 32
    decoded = dequantise_mxfp4_weight(*quantise_mxfp4_weight(original))
    assert bool(decoded[40, :32].isnan().all())
    assert decoded.isnan().sum().item() == 32


def test_wrong_shapes_are_refused_with_the_needed_ones() -> None:
    fp8 = quantise_fp8_weight(weight(40, 64))
    with pytest.raises(ArgumentError, match=r"\(1, 2\).*\(2, 2\)"):
        dequantise_fp8_weight(fp8.weight, fp8.scale[:1])
    with pytest.raises(ArgumentError, match="scales have shape"):
        dequantise_mxfp4_weight(torch.zeros(2, 32, dtype=torch.int8), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match="40 is not a multiple of 32"):
        quantise_mxfp4_weight(weight(2, 40))
    for one_dimensional in (quantise_fp8_weight, quantise_mxfp4_weight):
        with pytest.raises(ArgumentError, match=r"\[\.\.\., N, K\]"):
            one_dimensional(weight(64))
