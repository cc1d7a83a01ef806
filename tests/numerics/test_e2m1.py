"""E2M1 codes and nibble order."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.errors import ArgumentError
from deepinfer.numerics import decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from deepinfer.numerics.e2m1 import decode_e2m1_pairs

TABLE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def test_the_code_table_with_minus_zero() -> None:
    decoded = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert decoded.dtype == torch.float32
    assert decoded.tolist() == TABLE
    assert torch.signbit(decoded).tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("repeats", [1, 40])
def test_every_byte_decodes_to_its_two_codes_however_many_there_are(repeats: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(repeats).view(-1, 64)
    wanted = (
        torch.tensor([[TABLE[byte & 15], TABLE[byte >> 4]] for byte in range(256)]).repeat(repeats, 1).view(-1, 128)
    )
    for given in (packed, packed.view(torch.int8), packed.repeat(1, 2)[:, 64:]):
        decoded = decode_e2m1_pairs(given)
        assert torch.equal(decoded.view(torch.int32), wanted.view(torch.int32))


def test_encoding_inverts_decoding_on_every_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode_e2m1(torch.tensor(TABLE)), codes)


@pytest.mark.parametrize(
    ("midpoint", "lower", "tie"),
    [(0.25, 0, 0), (0.75, 1, 2), (1.25, 2, 2), (1.75, 3, 4), (2.5, 4, 4), (3.5, 5, 6), (5.0, 6, 6)],
)
def test_ties_go_to_the_even_code_and_neighbours_to_the_nearest(midpoint: float, lower: int, tie: int) -> None:
    x = torch.tensor([midpoint])
    below, above = torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(math.inf))
    both_signs = torch.cat((below, x, above, -below, -x, -above))
    assert encode_e2m1(both_signs).tolist() == [lower, tie, lower + 1, lower + 8, tie + 8, lower + 9]


def test_large_values_saturate_tiny_ones_keep_their_sign_and_nan_is_zero() -> None:
    x = torch.tensor([6.1, 1e30, math.inf, -7.0, -math.inf, 2.0**-149, -(2.0**-149), math.nan, -math.nan])
    assert encode_e2m1(x).tolist() == [7, 7, 7, 15, 15, 0, 8, 0, 0]


def test_even_elements_lie_in_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    golden = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert pack_nibbles(codes).tolist() == golden
    assert unpack_nibbles(torch.tensor(golden, dtype=torch.uint8)).tolist() == list(range(16))


def test_one_element_at_a_time_lands_in_its_own_nibble() -> None:
    for position in range(8):
        codes = torch.zeros(8, dtype=torch.uint8)
        codes[position] = 0xA
        expected = [0] * 4
        expected[position // 2] = 0xA0 if position % 2 else 0x0A
        assert pack_nibbles(codes).tolist() == expected


def test_every_byte_unpacks_the_same_from_every_one_byte_dtype() -> None:
    packed = torch.arange(256, dtype=torch.uint8)
    expected = [nibble for byte in range(256) for nibble in (byte % 16, byte // 16)]
    for dtype in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        assert unpack_nibbles(packed.view(dtype)).tolist() == expected
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


def test_strided_and_empty_inputs_pack_like_dense_ones() -> None:
    codes = torch.randint(0, 16, (6, 8), generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    for view in (codes[::2], codes[:, ::2], codes.T, codes[:1].expand(3, 8)):
        assert torch.equal(pack_nibbles(view), pack_nibbles(view.clone(memory_format=torch.contiguous_format)))
    assert pack_nibbles(codes[:0]).shape == (0, 4)
    assert unpack_nibbles(codes[:0]).shape == (0, 16)
    assert encode_e2m1(torch.zeros(0, 3)).shape == (0, 3)
    x = torch.randn(6, 8)
    assert torch.equal(encode_e2m1(x.T), encode_e2m1(x).T)


def test_an_odd_number_of_codes_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"\(2, 3\)"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))
