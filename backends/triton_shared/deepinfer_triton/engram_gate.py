"""The Engram gate: how far a looked-up value enters each residual stream.

Legend: T rows, S streams, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, require_float, require_shape
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.mixes import sigmoid
from deepinfer_triton.number_formats import bits_of, float_of
from deepinfer_triton.rows import aligned, alignment_of, consecutive
from deepinfer_triton.sizes import ModelSizes

LARGEST_BLOCK = 1024
_SMALLEST = tl.constexpr(1e-6)
_SIGN = tl.constexpr(-(2**31))


@kernel(unaligned=("alive_ptr",))
def engram_gate_kernel(
    streams_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    query_weight_ptr: tl.tensor,
    key_weight_ptr: tl.tensor,
    alive_ptr: tl.tensor,
    out_ptr: tl.tensor,
    streams_row_stride: tl.int64,
    streams_stream_stride: tl.int64,
    key_row_stride: tl.int64,
    key_stream_stride: tl.int64,
    value_stride: tl.int64,
    eps: tl.float32,
    root: tl.float32,
    STREAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    KEY_ALIGNMENT: tl.constexpr,
    VALUE_ALIGNMENT: tl.constexpr,
) -> None:
    """One program a row's stream: three sums over it in one pass, then the stream again."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    x_row = streams_ptr + tl.multiple_of(row * streams_row_stride + stream * streams_stream_stride, ALIGNMENT)
    key_row = key_ptr + tl.multiple_of(row * key_row_stride + stream * key_stream_stride, KEY_ALIGNMENT)
    value_row = value_ptr + tl.multiple_of(row * value_stride, VALUE_ALIGNMENT)
    out_row = out_ptr + (row * STREAMS + stream) * WIDTH
    products = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    key_squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        inside = start + column < WIDTH
        x = tl.load(x_row + start + column, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(key_row + start + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(query_weight_ptr + stream * WIDTH + start + column, mask=inside, other=0.0)
        weight = weight * tl.load(key_weight_ptr + stream * WIDTH + start + column, mask=inside, other=0.0)
        products += x * weight * key
        squares += x * x
        key_squares += key * key
    dot = tl.sum(products, 0) * tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    dot = dot * tl.rsqrt(tl.sum(key_squares, 0) / WIDTH + eps) * root
    size = tl.abs(dot)
    # Not a maximum instruction: those may return the other operand for NaN, and hide a broken row.
    size = tl.sqrt(tl.where(size < _SMALLEST, _SMALLEST, size))
    gate = sigmoid(float_of(bits_of(size) | (bits_of(dot) & _SIGN)))
    alive = tl.load(alive_ptr + row) != 0
    for start in range(0, WIDTH, BLOCK):
        inside = start + column < WIDTH
        x = tl.load(x_row + start + column, mask=inside, other=0.0)
        value = tl.load(value_row + start + column, mask=inside, other=0.0).to(tl.float32)
        gated = (x.to(tl.float32) + gate * value).to(out_ptr.dtype.element_ty)
        tl.store(out_row + start + column, tl.where(alive, gated, x), mask=inside)


@cache
def configuration(streams: int, width: int, dtype: torch.dtype, key: torch.dtype, value: torch.dtype) -> Configuration:
    """Return the configuration for streams of one width; key and value may have dtypes of their own."""
    block = min(power_of_two(width), LARGEST_BLOCK)
    floats = torch.float32
    signature = pointers(
        streams_ptr=dtype,
        key_ptr=key,
        value_ptr=value,
        query_weight_ptr=floats,
        key_weight_ptr=floats,
        alive_ptr=torch.uint8,
        out_ptr=dtype,
    )
    numbers = ("streams_row_stride", "streams_stream_stride", "key_row_stride", "key_stream_stride", "value_stride")
    constants = {
        "STREAMS": streams,
        "WIDTH": width,
        "BLOCK": block,
        "ALIGNMENT": alignment_of(width, dtype),
        "KEY_ALIGNMENT": alignment_of(width, key),
        "VALUE_ALIGNMENT": alignment_of(width, value),
    }
    return Configuration(
        engram_gate_kernel,
        {**signature, **dict.fromkeys(numbers, "i64"), "eps": "fp32", "root": "fp32"},
        constants,
        num_warps=min(4, warps_for(block)),
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's Engram layers use."""
    for dtype in ACTIVATION_DTYPES:
        yield configuration(sizes.streams, sizes.hidden, dtype, dtype, dtype)


def gate(
    streams_TSD: Tensor,
    key_TSD: Tensor,
    value_TD: Tensor,
    query_weight_SD: Tensor,
    key_weight_SD: Tensor,
    alive_T: Tensor,
    norm_eps: float,
) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.MemoryOps.gate`."""
    rows, streams, width = streams_TSD.shape
    for name, x, shape in (
        ("streams", streams_TSD, (rows, streams, width)),
        ("key", key_TSD, (rows, streams, width)),
        ("value", value_TD, (rows, width)),
    ):
        require_float("memory.gate", name, x)
        require_shape("memory.gate", name, x, shape)
    for name, weight in (("query weight", query_weight_SD), ("key weight", key_weight_SD)):
        require_shape("memory.gate", name, weight, (streams, width))
    streams_TSD, key_TSD, value_TD = aligned(streams_TSD), aligned(key_TSD), aligned(value_TD)
    out_TSD = torch.empty(streams_TSD.shape, dtype=streams_TSD.dtype, device=streams_TSD.device)
    launch(
        configuration(streams, width, streams_TSD.dtype, key_TSD.dtype, value_TD.dtype),
        (rows, streams),
        streams_TSD,
        key_TSD,
        value_TD,
        aligned(query_weight_SD.to(torch.float32).contiguous()),
        aligned(key_weight_SD.to(torch.float32).contiguous()),
        consecutive(alive_T),
        out_TSD,
        streams_TSD.stride(0),
        streams_TSD.stride(1),
        key_TSD.stride(0),
        key_TSD.stride(1),
        value_TD.stride(0),
        norm_eps,
        width**-0.5,
    )
    return out_TSD
