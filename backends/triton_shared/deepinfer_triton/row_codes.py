"""Rows of activations as e4m3 codes with a power of two for every 32 of them, what a served fp8 product sees.

Legend: n rows, K width, G groups of a row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.number_formats import INFINITY_BITS, fp8_codes, fp8_scales, largest_magnitude
from deepinfer_triton.rows import alignment_of, flat_rows
from deepinfer_triton.stored_matrices import GROUP

LARGEST_BLOCK = 64
"""Groups that one program encodes."""


@kernel()
def row_codes_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    x_stride: tl.int64,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """One program a row and a block of its groups; a ragged last group is encoded on its own."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < WIDTH
    x_row = x_ptr + tl.multiple_of(row * x_stride, ALIGNMENT)
    x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
    largest = largest_magnitude(x)
    finite = largest < INFINITY_BITS
    scale = fp8_scales(largest)
    tl.store(codes_ptr + row * WIDTH + column, fp8_codes(x, scale, finite).to(tl.uint8), mask=inside)
    tl.store(scales_ptr + row * GROUPS + group, tl.where(finite, scale, 255).to(tl.uint8), mask=group < GROUPS)


@cache
def configuration(width: int, dtype: torch.dtype) -> Configuration:
    """Return the configuration for rows of one width and dtype."""
    groups = -(-width // GROUP)
    block = min(LARGEST_BLOCK, power_of_two(groups))
    constants = {
        "WIDTH": width,
        "GROUP": GROUP,
        "GROUPS": groups,
        "BLOCK": block,
        "ALIGNMENT": alignment_of(width, dtype),
    }
    signature = pointers(x_ptr=dtype, codes_ptr=torch.uint8, scales_ptr=torch.uint8)
    return Configuration(row_codes_kernel, {**signature, "x_stride": "i64"}, constants, warps_for(block * GROUP))


class RowCodes(NamedTuple):
    """Codes uint8 [n, K] and scales uint8 [n, G]."""

    codes_nK: Tensor
    scales_nG: Tensor


def row_codes(x: Tensor) -> RowCodes:
    """Return codes of ``x [..., K]``, leading dimensions merged."""
    x_nK = flat_rows(x)
    rows, width = x_nK.shape
    chosen = configuration(width, x_nK.dtype)
    groups = int(chosen.constants["GROUPS"])
    codes_nK = torch.empty((rows, width), dtype=torch.uint8, device=x.device)
    scales_nG = torch.empty((rows, groups), dtype=torch.uint8, device=x.device)
    grid = (rows, -(-groups // int(chosen.constants["BLOCK"])))
    launch(chosen, grid, x_nK, codes_nK, scales_nG, x_nK.stride(0))
    return RowCodes(codes_nK, scales_nG)
