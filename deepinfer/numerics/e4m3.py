"""FP8 E4M3 (the ``fn`` variant: no infinity, NaN is 0x7F and 0xFF, largest value 448)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.numerics._tensors import as_float32, as_uint8, by_table

E4M3_MAX = 448.0
E4M3_NAN_CODE = 0x7F

_TABLE_SIZE = 256
_LEAST_LOOKED_UP = 4096
"""Fewer codes are cast sooner than the table is made."""


def encode_e4m3(x: Tensor) -> Tensor:
    """Returns uint8 codes: nearest, ties to even, saturating at +-448 (infinities too), -0 kept.

    Every NaN gives 0x7F whatever its sign, so that the bytes do not depend on which NaN a machine makes. float64 is
    rounded to float32 first.
    """
    x = as_float32(x, "encode_e4m3")
    # Clamped before the conversion because what the conversion alone does above 464 depends on the torch version.
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(x.isnan(), E4M3_NAN_CODE)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Returns the exact float32 values of codes given as uint8 or ``float8_e4m3fn``."""
    codes = as_uint8(codes, "decode_e4m3", torch.float8_e4m3fn)
    if codes.device.type == "cpu" and codes.numel() >= _LEAST_LOOKED_UP:
        return by_table(_decoded(torch.arange(_TABLE_SIZE, dtype=torch.uint8)), codes)
    return _decoded(codes)


def _decoded(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).to(torch.float32)
