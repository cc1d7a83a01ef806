"""Rotary positions: adjacent channels of a row's tail are turned by the angle of its position.

Legend: T rows, H heads, C head width, P positions, R pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, refuse, require_float
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import aligned, alignment_of, consecutive
from deepinfer_triton.sizes import ModelSizes

HEADS_A_PROGRAM = 8


@kernel(unaligned=("cos_ptr", "sin_ptr", "position_ptr"))
def rotary_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    position_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_row_stride: tl.int64,
    x_head_stride: tl.int64,
    heads: tl.int32,
    kept: tl.int64,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    INVERSE: tl.constexpr,
) -> None:
    """One program a row and a few heads."""
    KEPT: tl.constexpr = WIDTH - 2 * PAIRS
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here = (head < heads)[:, None]
    x_head = x_ptr + tl.multiple_of(row * x_row_stride, ALIGNMENT) + (head.to(tl.int64) * x_head_stride)[:, None]
    out_head = out_ptr + (row * heads + head)[:, None] * WIDTH
    if KEPT > 0:
        channel = tl.arange(0, KEPT_BLOCK)[None, :]
        copied = here & (channel < KEPT)
        tl.store(out_head + channel, tl.load(x_head + channel, mask=copied, other=0.0), mask=copied)
    pair = tl.arange(0, PAIR_BLOCK)
    inside = pair < PAIRS
    angle = tl.load(position_ptr + row) * PAIRS + pair
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)[None, :]
    if INVERSE:
        sin = 0.0 - sin
    turned = here & inside[None, :]
    # The tail's start is no constant, because triton-adapter takes steps of two apart only from 0 and 1.
    x_tail, out_tail, channel = x_head + kept, out_head + kept, 2 * pair[None, :]
    even = tl.load(x_tail + channel, mask=turned, other=0.0).to(tl.float32)
    odd = tl.load(x_tail + channel + 1, mask=turned, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_tail + channel, (even * cos - odd * sin).to(dtype), mask=turned)
    tl.store(out_tail + channel + 1, (odd * cos + even * sin).to(dtype), mask=turned)


@cache
def configuration(
    width: int,
    pairs: int,
    heads: int,
    dtype: torch.dtype,
    *,
    inverse: bool,
) -> Configuration:
    """Return the configuration for heads of one width and dtype."""
    # At least two: triton-adapter refuses steps of two apart in a block of one row.
    block = max(2, min(power_of_two(heads), HEADS_A_PROGRAM))
    kept_block = power_of_two(max(width - 2 * pairs, 1))
    signature = pointers(
        x_ptr=dtype, cos_ptr=torch.float32, sin_ptr=torch.float32, position_ptr=torch.int64, out_ptr=dtype
    )
    constants = {
        "WIDTH": width,
        "PAIRS": pairs,
        "HEADS": block,
        "KEPT_BLOCK": kept_block,
        "PAIR_BLOCK": power_of_two(pairs),
        "ALIGNMENT": alignment_of(width, dtype),
        "INVERSE": inverse,
    }
    return Configuration(
        rotary_kernel,
        {**signature, "x_row_stride": "i64", "x_head_stride": "i64", "heads": "i32", "kept": "i64"},
        constants,
        num_warps=warps_for(block * kept_block),
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model uses: queries and attention outputs, keys, index queries and keys."""
    pairs = sizes.rotary // 2
    for dtype in ACTIVATION_DTYPES:
        for inverse in (False, True):
            yield configuration(sizes.head_width, pairs, sizes.heads, dtype, inverse=inverse)
        yield configuration(sizes.head_width, pairs, 1, dtype, inverse=False)
        yield configuration(sizes.index_width, pairs, sizes.index_heads, dtype, inverse=False)
        yield configuration(sizes.index_width, pairs, 1, dtype, inverse=False)


def rotary(x: Tensor, table: RotaryTable, position_T: Tensor, *, inverse: bool) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.NormOps.rotary`."""
    require_float("norm.rotary", "x", x)
    width = table.rotary_width
    if x.dim() not in (2, 3) or x.shape[-1] < width:
        refuse("norm.rotary", f"x has shape {tuple(x.shape)}; give [T, C] or [T, H, C] with C of at least {width}")
    x_THC = aligned(x if x.dim() == 3 else x.unsqueeze(1))
    rows, heads, channels = x_THC.shape
    out_THC = torch.empty(x_THC.shape, dtype=x.dtype, device=x.device)
    chosen = configuration(channels, width // 2, max(heads, 1), x.dtype, inverse=inverse)
    launch(
        chosen,
        (rows, -(-heads // chosen.constants["HEADS"])),
        x_THC,
        table.cos_PR.contiguous(),
        table.sin_PR.contiguous(),
        consecutive(position_T),
        out_THC,
        x_THC.stride(0),
        x_THC.stride(1),
        heads,
        channels - width,
    )
    return out_THC.view(x.shape)
