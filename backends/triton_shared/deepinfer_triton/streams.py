"""Residual streams: collapsed into one row, and rebuilt from a sublayer's output. Streams are added in ascending order.

Legend: T rows, S streams, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.mixing import Mix
from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, require_float, require_shape
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import aligned
from deepinfer_triton.sizes import ModelSizes

LARGEST_BLOCK = 1024


@kernel(unaligned=("pre_ptr",))
def stream_collapse_kernel(
    streams_ptr: tl.tensor,
    pre_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.int64,
    stream_stride: tl.int64,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and a block of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x_row = streams_ptr + row * row_stride + column
    total = tl.load(pre_ptr + row * STREAMS) * tl.load(x_row, mask=inside, other=0.0).to(tl.float32)
    for stream in tl.static_range(1, STREAMS):
        x = tl.load(x_row + stream * stream_stride, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(pre_ptr + row * STREAMS + stream) * x
    tl.store(out_ptr + row * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@kernel(unaligned=("post_ptr", "comb_ptr"))
def stream_post_kernel(
    output_ptr: tl.tensor,
    streams_ptr: tl.tensor,
    post_ptr: tl.tensor,
    comb_ptr: tl.tensor,
    out_ptr: tl.tensor,
    output_stride: tl.int64,
    row_stride: tl.int64,
    stream_stride: tl.int64,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and a block of its columns; the streams stay in the first cache between targets."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x_row = streams_ptr + row * row_stride + column
    entering = tl.load(output_ptr + row * output_stride + column, mask=inside, other=0.0).to(tl.float32)
    comb_row = comb_ptr + row * (STREAMS * STREAMS)
    for target in tl.static_range(STREAMS):
        mixed = tl.load(comb_row + target) * tl.load(x_row, mask=inside, other=0.0).to(tl.float32)
        for source in tl.static_range(1, STREAMS):
            x = tl.load(x_row + source * stream_stride, mask=inside, other=0.0).to(tl.float32)
            mixed += tl.load(comb_row + source * STREAMS + target) * x
        total = tl.load(post_ptr + row * STREAMS + target) * entering + mixed
        place = out_ptr + (row * STREAMS + target) * WIDTH + column
        tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def collapse_configuration(streams: int, width: int, dtype: torch.dtype) -> Configuration:
    """Return the configuration that collapses streams of one width."""
    block = min(power_of_two(width), LARGEST_BLOCK)
    signature = pointers(streams_ptr=dtype, pre_ptr=torch.float32, out_ptr=dtype)
    return Configuration(
        stream_collapse_kernel,
        {**signature, "row_stride": "i64", "stream_stride": "i64"},
        {"STREAMS": streams, "WIDTH": width, "BLOCK": block},
        num_warps=warps_for(block),
    )


@cache
def post_configuration(streams: int, width: int, dtype: torch.dtype, output_dtype: torch.dtype) -> Configuration:
    """Return the configuration that rebuilds streams of one width."""
    block = min(power_of_two(width), LARGEST_BLOCK)
    floats = torch.float32
    signature = pointers(output_ptr=output_dtype, streams_ptr=dtype, post_ptr=floats, comb_ptr=floats, out_ptr=dtype)
    return Configuration(
        stream_post_kernel,
        {**signature, "output_stride": "i64", "row_stride": "i64", "stream_stride": "i64"},
        {"STREAMS": streams, "WIDTH": width, "BLOCK": block},
        num_warps=warps_for(block),
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's streams use."""
    for dtype in ACTIVATION_DTYPES:
        yield collapse_configuration(sizes.streams, sizes.hidden, dtype)
        yield post_configuration(sizes.streams, sizes.hidden, dtype, dtype)


def collapse(streams_TSD: Tensor, pre_TS: Tensor) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.MixingOps.collapse`."""
    require_float("mixing.collapse", "streams", streams_TSD)
    rows, streams, width = streams_TSD.shape
    require_shape("mixing.collapse", "pre", pre_TS, (rows, streams))
    streams_TSD = aligned(streams_TSD)
    out_TD = torch.empty((rows, width), dtype=streams_TSD.dtype, device=streams_TSD.device)
    chosen = collapse_configuration(streams, width, streams_TSD.dtype)
    launch(
        chosen,
        (rows, -(-width // int(chosen.constants["BLOCK"]))),
        streams_TSD,
        pre_TS.to(torch.float32).contiguous(),
        out_TD,
        streams_TSD.stride(0),
        streams_TSD.stride(1),
    )
    return out_TD


def post(output_TD: Tensor, streams_TSD: Tensor, mix: Mix) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.MixingOps.post`."""
    require_float("mixing.post", "streams", streams_TSD)
    require_float("mixing.post", "output", output_TD)
    rows, streams, width = streams_TSD.shape
    require_shape("mixing.post", "output", output_TD, (rows, width))
    require_shape("mixing.post", "post", mix.post_TS, (rows, streams))
    require_shape("mixing.post", "comb", mix.comb_TSS, (rows, streams, streams))
    output_TD, streams_TSD = aligned(output_TD), aligned(streams_TSD)
    out_TSD = torch.empty(streams_TSD.shape, dtype=streams_TSD.dtype, device=streams_TSD.device)
    chosen = post_configuration(streams, width, streams_TSD.dtype, output_TD.dtype)
    launch(
        chosen,
        (rows, -(-width // int(chosen.constants["BLOCK"]))),
        output_TD,
        streams_TSD,
        mix.post_TS.to(torch.float32).contiguous(),
        mix.comb_TSS.to(torch.float32).contiguous(),
        out_TSD,
        output_TD.stride(0),
        streams_TSD.stride(0),
        streams_TSD.stride(1),
    )
    return out_TSD
