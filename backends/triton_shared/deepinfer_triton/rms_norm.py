"""RMSNorm of rows.

Legend: n rows, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, require_float, require_width
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import aligned, alignment_of, flat_rows
from deepinfer_triton.sizes import ModelSizes

WIDEST_BLOCK = 8192
"""A row up to this width is read once and kept; wider ones are read twice, block by block."""


@kernel()
def rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.int64,
    eps: tl.float32,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + tl.multiple_of(row * x_stride, ALIGNMENT)
    out_row = out_ptr + row * WIDTH
    column = tl.arange(0, BLOCK)
    if BLOCK >= WIDTH:
        inside = column < WIDTH
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        rate = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        tl.store(out_row + column, (weight * x * rate).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            inside = start + column < WIDTH
            x = tl.load(x_row + start + column, mask=inside, other=0.0).to(tl.float32)
            squares += x * x
        rate = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        for start in range(0, WIDTH, BLOCK):
            inside = start + column < WIDTH
            x = tl.load(x_row + start + column, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + start + column, mask=inside, other=0.0)
            tl.store(out_row + start + column, (weight * x * rate).to(out_ptr.dtype.element_ty), mask=inside)


@cache
def configuration(width: int, dtype: torch.dtype) -> Configuration:
    """Return the configuration for rows of one width and dtype."""
    block = min(power_of_two(width), WIDEST_BLOCK)
    return Configuration(
        rms_norm_kernel,
        {**pointers(x_ptr=dtype, weight_ptr=torch.float32, out_ptr=dtype), "x_stride": "i64", "eps": "fp32"},
        {"WIDTH": width, "BLOCK": block, "ALIGNMENT": alignment_of(width, dtype)},
        num_warps=warps_for(block),
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's norms use: layers, compressed queries, keys, index keys."""
    for width in dict.fromkeys((sizes.hidden, sizes.query_rank, sizes.head_width, sizes.index_width)):
        for dtype in ACTIVATION_DTYPES:
            yield configuration(width, dtype)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.NormOps.rms`."""
    require_float("norm.rms", "x", x_TD)
    width = weight_D.shape[0]
    require_width("norm.rms", "x", x_TD, width)
    x_nD = flat_rows(x_TD)
    out_nD = torch.empty((x_nD.shape[0], width), dtype=x_TD.dtype, device=x_TD.device)
    weight_D = aligned(weight_D.to(torch.float32))
    launch(
        configuration(width, x_TD.dtype),
        (x_nD.shape[0],),
        x_nD,
        weight_D,
        out_nD,
        x_nD.stride(0),
        eps,
    )
    return out_nD.view(x_TD.shape)
