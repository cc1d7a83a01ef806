"""UE8M0 scale codes: every code, and every kind of value around every power of two."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.errors import ArgumentError
from deepinfer.numerics import ceil_power_code, decode_e8m0, encode_e8m0

INFINITY = math.inf
LARGEST = torch.finfo(torch.float32).max
SMALLEST_SUBNORMAL = 2.0**-149


def codes_of(encode: object, *values: float) -> list[int]:
    assert callable(encode)
    result: list[int] = encode(torch.tensor(values, dtype=torch.float32)).tolist()
    return result


def neighbours(value: float) -> tuple[float, float]:
    """The float32 just below and just above."""
    x = torch.tensor(value, dtype=torch.float32)
    below, above = torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(INFINITY))
    return below.item(), above.item()


def test_every_code_below_255_decodes_to_its_power_of_two() -> None:
    decoded = decode_e8m0(torch.arange(255, dtype=torch.uint8))
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]


def test_code_255_decodes_to_nan_and_134_does_not() -> None:
    assert decode_e8m0(torch.tensor([255, 134], dtype=torch.uint8)).tolist() == [
        pytest.approx(math.nan, nan_ok=True),
        128,
    ]


def test_decoding_takes_the_torch_dtype() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(
        decode_e8m0(codes.view(torch.float8_e8m0fnu)).nan_to_num(7.0), decode_e8m0(codes).nan_to_num(7.0)
    )


@pytest.mark.parametrize("encode", [encode_e8m0, ceil_power_code])
def test_encoding_inverts_decoding_on_every_code(encode: object) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert callable(encode)
    encoded = encode(decode_e8m0(codes))
    assert encoded.dtype == torch.uint8
    assert torch.equal(encoded, codes)


@pytest.mark.parametrize("k", range(-130, 131))
def test_powers_of_two_keep_their_code_and_saturate_at_the_ends(k: int) -> None:
    # float64 input: 2^128 and more are infinite once they are float32.
    x = torch.tensor([2.0**k], dtype=torch.float64)
    expected = 255 if k >= 128 else max(k, -127) + 127
    assert encode_e8m0(x).tolist() == [expected]
    assert ceil_power_code(x).tolist() == [expected]


@pytest.mark.parametrize("k", range(-126, 128))
def test_just_above_a_power_rounds_to_nearest_or_up_to_the_next(k: int) -> None:
    below, above = neighbours(2.0**k)
    assert codes_of(encode_e8m0, below, above) == [k + 127, k + 127]
    assert codes_of(ceil_power_code, below, above) == [k + 127, min(k + 128, 254)]


@pytest.mark.parametrize("k", range(-127, 127))
def test_half_way_between_two_powers_takes_the_larger(k: int) -> None:
    below, above = neighbours(1.5 * 2.0**k)
    assert codes_of(encode_e8m0, below, 1.5 * 2.0**k, above) == [k + 127, k + 128, k + 128]


def test_around_the_subnormal_power_of_code_zero() -> None:
    below, above = neighbours(2.0**-127)
    values = (0.0, -0.0, SMALLEST_SUBNORMAL, 2.0**-130, below, 2.0**-127, above, 2.0**-126)
    assert codes_of(encode_e8m0, *values) == [0, 0, 0, 0, 0, 0, 0, 1]
    assert codes_of(ceil_power_code, *values) == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("encode", [encode_e8m0, ceil_power_code])
def test_what_has_no_finite_power_becomes_the_nan_code(encode: object) -> None:
    values = (math.nan, -math.nan, INFINITY, -INFINITY, -1.0, -SMALLEST_SUBNORMAL, -LARGEST)
    assert codes_of(encode, *values) == [255] * len(values)


@pytest.mark.parametrize("encode", [encode_e8m0, ceil_power_code])
def test_finite_values_never_become_the_nan_code(encode: object) -> None:
    assert codes_of(encode, 2.0**127, neighbours(2.0**127)[1], 1.5 * 2.0**127, LARGEST) == [254] * 4


def test_the_power_that_is_rounded_up_is_the_smallest_not_below() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 0x7F000000, (20000,), generator=generator, dtype=torch.int32)
    v = bits.view(torch.float32)
    power = decode_e8m0(ceil_power_code(v)).double()
    assert bool((power >= v.double()).all())
    assert bool(((power / 2 < v.double()) | (power == 2.0**-127)).all())


def test_shapes_survive_including_scalars_and_zero_rows() -> None:
    for shape in ((), (0,), (0, 4), (3, 0), (2, 3, 4)):
        assert encode_e8m0(torch.ones(shape)).shape == shape
        assert decode_e8m0(torch.zeros(shape, dtype=torch.uint8)).shape == shape


def test_unsupported_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"torch\.int64.*torch\.bfloat16"):
        encode_e8m0(torch.tensor([1]))
    with pytest.raises(ArgumentError, match=r"torch\.int32.*torch\.float8_e8m0fnu"):
        decode_e8m0(torch.tensor([1], dtype=torch.int32))
