"""Coefficients of hyper-connections: one product over all streams, its statistic, and Sinkhorn's normalisation.

Legend: T rows, S streams, D hidden size, M = (2 + S) * S outputs, p pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer_triton import pieces_product as product
from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, refuse, require_float
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.sizes import ModelSizes

PIECES = 16
ROWS = 8


@device_function
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Return 1 / (1 + exp(-x)), NaN kept; no negation instruction, which not every lowering knows."""
    return 1.0 / (1.0 + tl.exp(0.0 - x))


@device_function
def piece_sum(column_ptr: tl.tensor, inside: tl.tensor, STORED: tl.constexpr, PIECES: tl.constexpr) -> tl.tensor:
    """Return the sum of pieces, first to last."""
    total = tl.load(column_ptr, mask=inside, other=0.0)
    for piece in range(1, PIECES):
        total += tl.load(column_ptr + piece * STORED, mask=inside, other=0.0)
    return total


@kernel(unaligned=("base_ptr", "scale_ptr"))
def mixes_kernel(
    partial_ptr: tl.tensor,
    base_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    pre_ptr: tl.tensor,
    post_ptr: tl.tensor,
    comb_ptr: tl.tensor,
    rows: tl.int64,
    mix_eps: tl.float32,
    norm_eps: tl.float32,
    iterations: tl.int32,
    STREAMS: tl.constexpr,
    STREAM_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program a few rows; from partial sums to the three groups of coefficients."""
    OUTPUTS: tl.constexpr = (2 + STREAMS) * STREAMS
    STORED: tl.constexpr = OUTPUTS + 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    sums = partial_ptr + row * PIECES * STORED
    rate = tl.rsqrt(piece_sum(sums + OUTPUTS, here, STORED, PIECES) / WIDTH + norm_eps)
    stream = tl.arange(0, STREAM_BLOCK)
    real = stream < STREAMS
    inside = here[:, None] & real[None, :]
    gates = row[:, None] * STREAMS + stream[None, :]
    scale = tl.load(scale_ptr)
    base = tl.load(base_ptr + stream, mask=real, other=0.0)[None, :]
    mixed = piece_sum(sums[:, None] + stream[None, :], inside, STORED, PIECES) * rate[:, None]
    tl.store(pre_ptr + gates, sigmoid(mixed * scale + base) + mix_eps, mask=inside)
    scale = tl.load(scale_ptr + 1)
    base = tl.load(base_ptr + STREAMS + stream, mask=real, other=0.0)[None, :]
    mixed = piece_sum(sums[:, None] + STREAMS + stream[None, :], inside, STORED, PIECES) * rate[:, None]
    tl.store(post_ptr + gates, sigmoid(mixed * scale + base) * 2.0, mask=inside)
    # [row, source, target]; what lies beyond the streams stays 0 and adds nothing.
    scale = tl.load(scale_ptr + 2)
    cell = stream[:, None] * STREAMS + stream[None, :]
    known = real[:, None] & real[None, :]
    base_SS = tl.load(base_ptr + 2 * STREAMS + cell, mask=known, other=0.0)
    cells = known[None, :, :] & here[:, None, None]
    mixed_TSS = piece_sum(sums[:, None, None] + 2 * STREAMS + cell[None, :, :], cells, STORED, PIECES)
    logits = mixed_TSS * rate[:, None, None] * scale + base_SS[None, :, :]
    largest = tl.max(tl.where(known[None, :, :], logits, -float("inf")), 2)
    largest = tl.where(real[None, :], largest, 0.0)
    comb = tl.where(known[None, :, :], tl.exp(logits - largest[:, :, None]), 0.0)
    comb = comb / tl.where(real[None, :], tl.sum(comb, 2), 1.0)[:, :, None]
    comb = tl.where(known[None, :, :], comb + mix_eps, 0.0)
    comb = comb / (tl.sum(comb, 1) + mix_eps)[:, None, :]
    for _ in range(1, iterations):
        comb = comb / (tl.sum(comb, 2) + mix_eps)[:, :, None]
        comb = comb / (tl.sum(comb, 1) + mix_eps)[:, None, :]
    tl.store(comb_ptr + row[:, None, None] * (STREAMS * STREAMS) + cell[None, :, :], comb, mask=cells)


@cache
def configuration(streams: int, width: int, pieces: int) -> Configuration:
    """Return the configuration for so many streams of together ``width`` values."""
    floats = torch.float32
    signature = pointers(
        partial_ptr=floats, base_ptr=floats, scale_ptr=floats, pre_ptr=floats, post_ptr=floats, comb_ptr=floats
    )
    numbers = {"rows": "i64", "mix_eps": "fp32", "norm_eps": "fp32", "iterations": "i32"}
    constants = {
        "STREAMS": streams,
        "STREAM_BLOCK": power_of_two(streams),
        "WIDTH": width,
        "PIECES": pieces,
        "ROWS": ROWS,
    }
    return Configuration(mixes_kernel, {**signature, **numbers}, constants, num_warps=1)


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's mixes use."""
    width, outputs = sizes.streams * sizes.hidden, (2 + sizes.streams) * sizes.streams
    for dtype in ACTIVATION_DTYPES:
        chosen = product.configuration(width, outputs, PIECES, dtype, torch.float32, squares=True)
        yield chosen
    yield configuration(sizes.streams, width, int(chosen.constants["PIECES"]))


def mixes(streams_TSD: Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float) -> Mix:
    """See :meth:`deepinfer.accelerator.ops.MixingOps.mixes`."""
    require_float("mixing.mixes", "streams", streams_TSD)
    rows, streams, hidden = streams_TSD.shape
    width, outputs = streams * hidden, (2 + streams) * streams
    if tuple(weights.fn_MK.shape) != (outputs, width) or iterations < 1:
        refuse(
            "mixing.mixes",
            f"streams {tuple(streams_TSD.shape)} need fn {(outputs, width)} and at least one iteration; "
            f"got fn {tuple(weights.fn_MK.shape)} and {iterations} iterations",
        )
    device = streams_TSD.device
    pre_TS = torch.empty((rows, streams), dtype=torch.float32, device=device)
    post_TS = torch.empty((rows, streams), dtype=torch.float32, device=device)
    comb_TSS = torch.empty((rows, streams, streams), dtype=torch.float32, device=device)
    if rows:
        fn_MK = weights.fn_MK.to(torch.float32)
        pieces = product.pieces_product(streams_TSD.reshape(rows, width), fn_MK, PIECES, squares=True)
        launch(
            configuration(streams, width, pieces.number),
            (-(-rows // ROWS),),
            pieces.partial_TpM,
            weights.base_M.to(torch.float32).contiguous(),
            weights.scale_3.to(torch.float32).contiguous(),
            pre_TS,
            post_TS,
            comb_TSS,
            rows,
            mix_eps,
            norm_eps,
            iterations,
        )
    return Mix(pre_TS, post_TS, comb_TSS)
