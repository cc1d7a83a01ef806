"""Block formats against a slow float64 reading of their rules, and on the inputs that break quantisers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.errors import ArgumentError
from deepinfer.numerics import (
    QuantisedBlocks,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    dequantise_fp4_e4m3_blocks,
    dequantise_fp8_blocks,
    dequantise_mxfp4_blocks,
    encode_e2m1,
    encode_e4m3,
    fake_quant_fp8,
    fake_quant_mxfp4,
    quantise_fp4_e4m3_blocks,
    quantise_fp8_blocks,
    quantise_mxfp4_blocks,
    unpack_nibbles,
)

FP32_ONE_SIXTH = (torch.ones(()) / torch.tensor(6.0)).item()


class Format(NamedTuple):
    """One block format with what its rule says about special blocks."""

    quantise: Callable[[Tensor], QuantisedBlocks]
    dequantise: Callable[[Tensor, Tensor], Tensor]
    group: int
    element_max: float
    zero_scale: int
    nan_scale: int
    nan_element_byte: int


FORMATS = {
    # 2^ceil(log2(1e-4 / 448)) = 2^-22; 6 * 2^-126 / 6 = 2^-126; e4m3(2^-9) is code 1.
    "fp8": Format(quantise_fp8_blocks, dequantise_fp8_blocks, 32, 448.0, 105, 255, 0x7F),
    "mxfp4": Format(quantise_mxfp4_blocks, dequantise_mxfp4_blocks, 32, 6.0, 1, 255, 0),
    "fp4_e4m3": Format(quantise_fp4_e4m3_blocks, dequantise_fp4_e4m3_blocks, 16, 6.0, 1, 0x7F, 0),
}


@pytest.fixture(params=sorted(FORMATS))
def fmt(request: pytest.FixtureRequest) -> Format:
    return FORMATS[str(request.param)]


def random_rows(*shape: int, seed: int = 5) -> Tensor:
    """Normal values whose magnitude varies over many powers of two from block to block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    exponent = torch.randint(-8, 8, (*shape[:-1], shape[-1] // 16), generator=generator)
    return x * 2.0 ** exponent.repeat_interleave(16, -1)


def round_trip(fmt: Format, x: Tensor) -> Tensor:
    return fmt.dequantise(*fmt.quantise(x))


def same_bytes(left: QuantisedBlocks, right: QuantisedBlocks) -> bool:
    return torch.equal(left.codes, right.codes) and torch.equal(left.scales, right.scales)


def nearest_in(values: Tensor, scaled: Tensor) -> Tensor:
    """Index of the nearest of ``values`` for each non-negative float64 ``scaled``; a tie takes the even index."""
    distance = (scaled.unsqueeze(-1) - values.double()).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    index = torch.arange(len(values))
    even = nearest & (index % 2 == 0)
    return torch.where(even.any(-1), even.int().argmax(-1), nearest.int().argmax(-1))


def test_fp8_equals_a_search_for_the_nearest_code_under_the_smallest_sufficient_power() -> None:
    x = random_rows(40, 64)
    codes, scales = quantise_fp8_blocks(x)
    blocks = x.view(40, 2, 32).double()
    powers = 2.0 ** torch.arange(-127, 128, dtype=torch.float64)
    sufficient = powers * 448 >= blocks.abs().amax(-1).clamp(min=1e-4).unsqueeze(-1)
    assert torch.equal(scales.long(), sufficient.int().argmax(-1))
    scaled = blocks / powers[scales.long()].unsqueeze(-1)
    expected = nearest_in(decode_e4m3(torch.arange(127, dtype=torch.uint8)), scaled.abs()) + 128 * (scaled < 0)
    assert torch.equal(codes.long(), expected.flatten(-2))


def test_mxfp4_equals_a_search_for_the_nearest_code_under_the_smallest_sufficient_power() -> None:
    x = random_rows(40, 64)
    packed, scales = quantise_mxfp4_blocks(x)
    blocks = x.view(40, 2, 32).double()
    powers = 2.0 ** torch.arange(-127, 128, dtype=torch.float64)
    sufficient = powers * 6 >= blocks.abs().amax(-1).unsqueeze(-1)
    assert torch.equal(scales.long(), sufficient.int().argmax(-1))
    scaled = blocks / powers[scales.long()].unsqueeze(-1)
    expected = nearest_in(decode_e2m1(torch.arange(8, dtype=torch.uint8)), scaled.abs()) + 8 * (scaled < 0)
    assert torch.equal(unpack_nibbles(packed).long(), expected.flatten(-2))


def test_fp4_e4m3_equals_a_search_with_each_product_rounded_to_float32_once() -> None:
    x = random_rows(80, 64)
    packed, scales = quantise_fp4_e4m3_blocks(x)
    blocks = x.view(80, 4, 16).double()
    values = decode_e4m3(torch.arange(127, dtype=torch.uint8))
    sixth = (blocks.abs().amax(-1).clamp(min=6 * 2.0**-9) * FP32_ONE_SIXTH).float().double()
    assert torch.equal(scales.long(), nearest_in(values, sixth.clamp(max=448)))
    reciprocal = (1 / values[scales.long()].double()).float().double()
    scaled = (blocks * reciprocal.unsqueeze(-1)).float().double()
    expected = nearest_in(decode_e2m1(torch.arange(8, dtype=torch.uint8)), scaled.abs()) + 8 * (scaled < 0)
    assert torch.equal(unpack_nibbles(packed).long(), expected.flatten(-2))


def test_reciprocal_and_division_differ_in_exactly_42_pairs_of_scale_and_bfloat16_value() -> None:
    scales = decode_e4m3(torch.arange(1, 127, dtype=torch.uint8))
    x = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    by_reciprocal = encode_e2m1(x.unsqueeze(-1) * scales.reciprocal())
    by_division = encode_e2m1(x.unsqueeze(-1) / scales)
    value_index, scale_index = (by_reciprocal != by_division).nonzero().unbind(-1)
    assert len(scale_index) == 42
    assert set((scales[scale_index].frexp().mantissa * 2).tolist()) == {1.875}
    assert set((x[value_index] / scales[scale_index]).tolist()) == {1.25, 2.5, 5.0}


def test_the_long_range_scale_is_a_product_with_a_rounded_sixth_not_a_quotient() -> None:
    # Just below 6 * 1.1875 the product rounds to 1.1875, a tie that goes up to the even code 0x3A; the quotient by 6
    # stays below the tie.
    amax = torch.nextafter(torch.tensor(6 * 1.1875), torch.tensor(0.0))
    assert encode_e4m3(amax / torch.tensor(6.0)).item() == 0x39
    assert quantise_fp4_e4m3_blocks(amax.expand(16)).scales.tolist() == [0x3A]


def test_the_long_range_quantiser_takes_the_reciprocal_side_of_those_pairs() -> None:
    # Scale 1.875: 1.25 * 1.875 is a tie for the division (code 2) and just above it for the reciprocal (code 3).
    block = torch.zeros(16)
    block[0], block[1] = 6 * 1.875, 1.25 * 1.875
    packed, scales = quantise_fp4_e4m3_blocks(block)
    assert decode_e4m3(scales).tolist() == [1.875]
    assert packed[0].item() == 0x37


@pytest.mark.parametrize("k", [-60, -14, -1, 0, 1, 30, 100])
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_power_scales_move_exactly_when_the_maximum_passes_the_format_maximum(name: str, k: int) -> None:
    fmt = FORMATS[name]
    if name == "fp8":
        k = max(k, -20)
    edge = torch.tensor(fmt.element_max * 2.0**k)
    below, above = torch.nextafter(edge, torch.tensor(0.0)), torch.nextafter(edge, torch.tensor(math.inf))
    x = torch.zeros(3, 32)
    x[:, 7] = torch.stack((below, edge, above))
    assert fmt.quantise(x).scales.flatten().tolist() == [127 + k, 127 + k, 128 + k]


def test_the_block_maximum_is_never_clipped_and_is_off_by_half_a_step_at_most(fmt: Format) -> None:
    amax = torch.linspace(0.24, 4.2, 5000)
    x = torch.zeros(5000, fmt.group)
    x[:, 3] = -amax
    x[:, 4] = amax / 3
    codes, scales = fmt.quantise(x)
    decoded = fmt.dequantise(codes, scales)
    if fmt.element_max == 448:
        scale, half_step = decode_e8m0(scales).flatten(), 2.0 ** torch.floor(torch.log2(amax)) / 16
    else:
        scale = (decode_e4m3(scales) if fmt.nan_scale == 0x7F else decode_e8m0(scales)).flatten()
        half_step = scale * torch.where(amax > 4 * scale, 1.0, 0.5)
    # An E4M3 scale is rounded to the nearest, so the maximum may pass 6 by half a step of the scale, 1/16.
    slack = 17 / 16 if fmt.nan_scale == 0x7F else 1.0
    assert bool((amax <= fmt.element_max * scale * slack).all())
    assert bool(((decoded[:, 3] + amax).abs() <= half_step).all())


def test_decoding_multiplies_with_the_stored_scale(fmt: Format) -> None:
    codes, scales = fmt.quantise(random_rows(4, 64))
    elements = decode_e4m3(codes) if fmt.element_max == 448 else decode_e2m1(unpack_nibbles(codes))
    scale = decode_e4m3(scales) if fmt.nan_scale == 0x7F else decode_e8m0(scales)
    assert torch.equal(fmt.dequantise(codes, scales), elements * scale.repeat_interleave(fmt.group, -1))


def test_zero_blocks_stay_zero_with_a_finite_scale_and_keep_their_signs(fmt: Format) -> None:
    x = torch.zeros(2, fmt.group)
    x[1] = -0.0
    codes, scales = fmt.quantise(x)
    assert scales.flatten().tolist() == [fmt.zero_scale] * 2
    decoded = fmt.dequantise(codes, scales)
    assert torch.equal(decoded, x)
    assert torch.equal(torch.signbit(decoded), torch.signbit(x))


def test_subnormals_stay_small_and_finite(fmt: Format) -> None:
    x = torch.full((2, fmt.group), 2.0**-149)
    x[1] = torch.finfo(torch.float32).tiny
    decoded = round_trip(fmt, x)
    assert bool((decoded >= 0).all())
    assert bool((decoded <= 2 * torch.finfo(torch.float32).tiny).all())
    assert fmt.quantise(x).scales[0].tolist() == [fmt.zero_scale]


def test_one_huge_value_does_not_disturb_its_zeros(fmt: Format) -> None:
    x = torch.zeros(fmt.group)
    x[5] = 1e30 if fmt.nan_scale == 255 else 2500.0
    decoded = round_trip(fmt, x)
    assert bool((decoded[torch.arange(fmt.group) != 5] == 0).all())
    assert decoded[5].item() == pytest.approx(x[5].item(), rel=1 / 6)


@pytest.mark.parametrize("position", [0, 1, 15])
@pytest.mark.parametrize("nan_bits", [0x7FC00000, -0x400000, 0x7F800001])
def test_nan_takes_its_own_block_and_no_other(fmt: Format, position: int, nan_bits: int) -> None:
    clean = random_rows(2, 3 * fmt.group)
    x = clean.clone()
    x[1, fmt.group + position] = torch.tensor(nan_bits, dtype=torch.int32).view(torch.float32)
    codes, scales = fmt.quantise(x)
    clean_codes, clean_scales = fmt.quantise(clean)
    assert scales[1, 1].item() == fmt.nan_scale
    per_block = codes.shape[-1] // 3
    assert codes[1, per_block : 2 * per_block].tolist() == [fmt.nan_element_byte] * per_block
    decoded = fmt.dequantise(codes, scales)
    assert bool(decoded[1, fmt.group : 2 * fmt.group].isnan().all())
    codes[1, per_block : 2 * per_block] = clean_codes[1, per_block : 2 * per_block]
    scales[1, 1] = clean_scales[1, 1]
    assert same_bytes(QuantisedBlocks(codes, scales), QuantisedBlocks(clean_codes, clean_scales))


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_infinity_is_nan_under_power_scales_and_saturates_under_e4m3_scales(fmt: Format, infinity: float) -> None:
    x = torch.full((2 * fmt.group,), 1.5)
    x[2] = infinity
    decoded = round_trip(fmt, x)
    assert bool((decoded[fmt.group :] == 1.5).all())
    if fmt.nan_scale == 255:
        assert bool(decoded[: fmt.group].isnan().all())
    else:
        assert decoded[2].item() == math.copysign(2688, infinity)
        assert bool((decoded[:2] == 0).all())


def test_long_range_values_beyond_the_largest_scale_saturate() -> None:
    x = torch.tensor([2688.0, 3000.0, -1e30, 448.0] + [0.0] * 12)
    assert round_trip(FORMATS["fp4_e4m3"], x)[:4].tolist() == [2688.0, 2688.0, -2688.0, 448.0]


def test_the_largest_float32_has_a_finite_scale() -> None:
    x = torch.full((32,), torch.finfo(torch.float32).max)
    assert quantise_fp8_blocks(x).scales.tolist() == [120 + 127]
    assert quantise_mxfp4_blocks(x).scales.tolist() == [126 + 127]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[1:, :, 32:],
        lambda x: x[..., ::2],
        lambda x: x[:1, :1].expand(3, 2, 128),
        lambda x: x[..., :1].expand(4, 6, 64),
        lambda x: x.transpose(0, 2)[:, :, :1].transpose(0, 2).flip(-1),
    ],
    ids=["transposed", "stepped", "offset", "stepped_last", "broadcast_rows", "broadcast_last", "flipped"],
)
def test_strided_views_equal_dense_copies(fmt: Format, view: Callable[[Tensor], Tensor]) -> None:
    strided = view(random_rows(4, 6, 128))
    dense = strided.clone(memory_format=torch.contiguous_format)
    quantised = fmt.quantise(strided)
    assert same_bytes(quantised, fmt.quantise(dense))
    wide = QuantisedBlocks(*(torch.stack((part, part), -1)[..., 0] for part in quantised))
    assert torch.equal(fmt.dequantise(*wide), fmt.dequantise(*quantised))


@pytest.mark.parametrize("shape", [(0, 64), (64,), (2, 0, 64), (2, 3, 4, 64), (3, 0)])
def test_any_leading_dimensions_and_zero_rows(fmt: Format, shape: tuple[int, ...]) -> None:
    # 1.5 = 6 * 0.25 is exact under every scale rule.
    x = torch.full(shape, 1.5)
    codes, scales = fmt.quantise(x)
    assert codes.dtype == scales.dtype == torch.uint8
    assert scales.shape == (*shape[:-1], shape[-1] // fmt.group)
    assert torch.equal(fmt.dequantise(codes, scales), x)


def test_rows_do_not_depend_on_their_neighbours(fmt: Format) -> None:
    x = random_rows(9, 64)
    alone = torch.cat([fmt.quantise(x[row : row + 1]).codes for row in range(9)])
    assert torch.equal(fmt.quantise(x).codes, alone)


def test_other_float_dtypes_are_quantised_as_their_float32_values(fmt: Format) -> None:
    x64 = random_rows(4, 64).double() * (1 + 2.0**-40)
    assert same_bytes(fmt.quantise(x64), fmt.quantise(x64.float()))
    x16 = random_rows(4, 64).bfloat16()
    assert same_bytes(fmt.quantise(x16), fmt.quantise(x16.float()))


def test_wrong_widths_scales_and_dtypes_are_refused(fmt: Format) -> None:
    with pytest.raises(ArgumentError, match="24 is not a multiple of"):
        fmt.quantise(torch.ones(2, 24))
    with pytest.raises(ArgumentError, match="no dimension"):
        fmt.quantise(torch.ones(()))
    with pytest.raises(ArgumentError, match=r"torch\.int32"):
        fmt.quantise(torch.ones(2, 32, dtype=torch.int32))
    codes, scales = fmt.quantise(torch.ones(2, 64))
    with pytest.raises(ArgumentError, match="scales have shape"):
        fmt.dequantise(codes, scales[:, :1])
    with pytest.raises(ArgumentError, match="scales have shape"):
        fmt.dequantise(codes[:1], scales)


def test_a_group_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ArgumentError, match="group is 0"):
        quantise_fp8_blocks(torch.ones(32), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_quantisation_is_the_round_trip_in_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    x = random_rows(5, 64).to(dtype)
    for fake, name in ((fake_quant_fp8, "fp8"), (fake_quant_mxfp4, "mxfp4")):
        result = fake(x)
        assert result.dtype == dtype
        assert torch.equal(result.double(), round_trip(FORMATS[name], x).double())


@given(
    st.lists(st.floats(width=32, allow_nan=False, min_value=-(2.0**100), max_value=2.0**100), min_size=32, max_size=32)
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_values_that_came_from_a_power_scale_block_survive_a_second_round_trip(values: list[float]) -> None:
    for fmt in (FORMATS["fp8"], FORMATS["mxfp4"]):
        once = round_trip(fmt, torch.tensor(values))
        assert torch.equal(round_trip(fmt, once), once)


@given(st.lists(st.floats(width=32, min_value=-2688, max_value=2688), min_size=16, max_size=16))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_long_range_values_are_off_by_a_sixth_of_the_maximum_at_most(values: list[float]) -> None:
    x = torch.tensor(values)
    fmt = FORMATS["fp4_e4m3"]
    # The widest step is 2 scales, half of it is 1; the scale is at most 17/16 of amax / 6, or 1.5 of it among the
    # subnormal scales, whose floor is 2^-9.
    amax = x.abs().max().item()
    bound = max(amax / 6 * 17 / 16, 1.5 * 2.0**-9 * max(1.0, amax / 6 * 2.0**9))
    assert (round_trip(fmt, x) - x).abs().max().item() <= bound
