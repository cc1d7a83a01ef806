"""FP4 E2M1: sign in bit 3, magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; two codes per byte, even index in the low nibble."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.errors import ArgumentError
from deepinfer.numerics._tensors import as_float32, as_uint8, by_table

E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_TABLE_SIZE = 256
_LEAST_LOOKED_UP = 512
"""Fewer bytes are unpacked sooner than the table is made."""

_VALUES = E2M1_MAGNITUDES + tuple(-magnitude for magnitude in E2M1_MAGNITUDES)


def _round_up_bounds() -> tuple[float, ...]:
    """A magnitude takes code c or more if and only if it is greater than bound c - 1.

    Half way between codes c - 1 and c the even one wins: for odd c that is c - 1, and the bound is the midpoint
    itself; for even c it is c, and the bound is the float32 just below the midpoint.
    """
    bounds = []
    for code in range(1, len(E2M1_MAGNITUDES)):
        midpoint = (E2M1_MAGNITUDES[code - 1] + E2M1_MAGNITUDES[code]) / 2
        ulp = 2.0 ** (math.frexp(midpoint)[1] - 24)
        bounds.append(midpoint if code % 2 else midpoint - ulp)
    return tuple(bounds)


_BOUNDS = _round_up_bounds()


def encode_e2m1(x: Tensor) -> Tensor:
    """Returns one uint8 code (0..15) per element: nearest, ties to the even code, saturating at +-6, -0 kept.

    Infinities saturate. NaN has no code here and gives 0; the block formats keep it in the block's scale. float64 is
    rounded to float32 first.
    """
    x = as_float32(x, "encode_e2m1")
    bounds = torch.tensor(_BOUNDS, dtype=torch.float32, device=x.device)
    magnitude_codes = torch.bucketize(x.abs().contiguous(), bounds, out_int32=True)
    codes = magnitude_codes | (torch.signbit(x).to(torch.int32) << 3)
    return codes.masked_fill(x.isnan(), 0).to(torch.uint8)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Returns the float32 values of one-per-byte uint8 codes; only the low four bits of each byte are read."""
    values = torch.tensor(_VALUES, dtype=torch.float32, device=codes.device)
    return values[as_uint8(codes, "decode_e2m1").to(torch.int64) & 0xF]


def decode_e2m1_pairs(packed: Tensor) -> Tensor:
    """Returns float32 ``[..., 2n]`` from packed bytes ``[..., n]``: ``decode_e2m1(unpack_nibbles(packed))``."""
    packed = as_uint8(packed, "decode_e2m1_pairs", torch.int8, torch.float4_e2m1fn_x2)
    if packed.device.type != "cpu" or packed.numel() < _LEAST_LOOKED_UP or packed.dim() == 0:
        return decode_e2m1(unpack_nibbles(packed))
    bytes_of_table = torch.arange(_TABLE_SIZE, dtype=torch.uint8)
    # Two values of four bytes are moved as one of eight.
    pairs = decode_e2m1(unpack_nibbles(bytes_of_table)).view(torch.int64)
    return by_table(pairs, packed).view(torch.float32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Returns uint8 ``[..., n / 2]`` from codes ``[..., n]``: element 2i low, 2i + 1 high in byte i.

    Raises:
        ArgumentError: if ``n`` is odd.
    """
    codes = as_uint8(codes, "pack_nibbles") & 0xF
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ArgumentError("pack_nibbles", [f"shape {tuple(codes.shape)} has no even last dimension to pair"])
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Returns uint8 codes ``[..., 2n]`` from bytes ``[..., n]`` given as uint8, int8 or ``float4_e2m1fn_x2``."""
    packed = as_uint8(packed, "unpack_nibbles", torch.int8, torch.float4_e2m1fn_x2)
    if packed.dim() == 0:
        raise ArgumentError("unpack_nibbles", ["input has no dimension; give at least [bytes]"])
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
