"""E4M3 codes against the format's definition, all of them."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.errors import ArgumentError
from deepinfer.numerics import decode_e4m3, encode_e4m3


def value_of(code: int) -> float:
    """The definition: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits, no infinity, one NaN per sign."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def test_every_code_decodes_to_its_definition() -> None:
    decoded = decode_e4m3(torch.arange(256, dtype=torch.uint8))
    assert decoded.dtype == torch.float32
    expected = torch.tensor([value_of(code) for code in range(256)])
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(torch.signbit(decoded[:255]), torch.signbit(expected[:255]))


def test_many_codes_decode_to_the_same_bits_as_few() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    few = decode_e4m3(codes).view(torch.int32)
    for many in (codes.repeat(64), codes.repeat(64).view(32, 512)[:, ::2], codes.view(torch.float8_e4m3fn).repeat(64)):
        decoded = decode_e4m3(many)
        assert decoded.shape == many.shape
        assert torch.equal(decoded.view(torch.int32), few[many.view(torch.uint8).long()])


def test_encoding_inverts_decoding_and_keeps_minus_zero() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(encode_e4m3(decode_e4m3(codes)), codes)


def test_every_nan_becomes_one_code() -> None:
    nans = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    assert bool(nans.isnan().all())
    assert encode_e4m3(nans).tolist() == [0x7F] * 5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_nearest(sign: float) -> None:
    lower = torch.arange(126)
    values = torch.tensor([value_of(code) for code in range(127)])
    midpoints = (values[:-1] + values[1:]) / 2
    below = torch.nextafter(midpoints, torch.tensor(0.0))
    above = torch.nextafter(midpoints, torch.tensor(math.inf))
    sign_bit = 0x80 if sign < 0 else 0
    assert torch.equal(encode_e4m3(sign * midpoints).int(), (lower + lower % 2).int() | sign_bit)
    assert torch.equal(encode_e4m3(sign * below).int(), lower.int() | sign_bit)
    assert torch.equal(encode_e4m3(sign * above).int(), (lower + 1).int() | sign_bit)


def test_large_values_and_infinities_saturate_and_tiny_ones_become_zero() -> None:
    large = torch.tensor([448.0, 464.0, 465.0, 480.0, 1e30, math.inf])
    assert encode_e4m3(large).tolist() == [0x7E] * 6
    assert encode_e4m3(-large).tolist() == [0xFE] * 6
    assert encode_e4m3(torch.tensor([2.0**-10, -(2.0**-10), 2.0**-149])).tolist() == [0, 0x80, 0]


def test_agrees_with_the_conversion_of_torch_on_random_bits_in_range() -> None:
    bits = torch.randint(-(2**31), 2**31, (50000,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[x.abs() <= 448]
    assert len(x) > 10000
    assert torch.equal(encode_e4m3(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_torch_dtype_is_taken_and_other_dtypes_are_refused() -> None:
    codes = torch.tensor([0x38, 0xC0], dtype=torch.uint8)
    assert decode_e4m3(codes.view(torch.float8_e4m3fn)).tolist() == [1.0, -2.0]
    with pytest.raises(ArgumentError, match=r"torch\.float8_e5m2"):
        decode_e4m3(codes.view(torch.float8_e5m2))
    with pytest.raises(ArgumentError, match=r"torch\.float16"):
        encode_e4m3(torch.zeros(1, dtype=torch.float16))


def test_strided_inputs_equal_dense_ones() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
    for view in (x.T, x[::2, 1::3], x[1:2].expand(4, 10), x.flip(0)):
        assert torch.equal(encode_e4m3(view), encode_e4m3(view.clone(memory_format=torch.contiguous_format)))
    codes = encode_e4m3(x)
    assert torch.equal(decode_e4m3(codes[:, ::2]), decode_e4m3(codes)[:, ::2])
