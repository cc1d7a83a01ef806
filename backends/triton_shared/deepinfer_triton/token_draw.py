"""Counter-based random numbers, and tokens drawn by inverting the cumulative weight: exact on every device.

Legend: B rows, V vocabulary, c chunks.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer_triton.configuration import Configuration, launch, pointers, warps_for
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.token_weights import (
    ChunkMaxima,
    chunk_constants,
    chunk_of,
    chunks_of,
    row_best_token,
    row_largest,
    row_status,
)

ROWS = 128

_OK = tl.constexpr(int(RowStatus.OK))
_WORD = tl.constexpr(0xFFFFFFFF)
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)
_ROUNDS = tl.constexpr(10)
_UNIT = tl.constexpr(2.0**-53)


@device_function
def high_word(product: tl.tensor) -> tl.tensor:
    """Return the high 32 bits of an int64 whose top bit may be set."""
    return (product >> 32) & _WORD


@device_function
def uniform_of(seed: tl.tensor, stream: tl.tensor) -> tl.tensor:
    """Return the 53 high bits of Philox4x32-10(key = seed, counter = stream) over 2^53; words are held in int64."""
    key_0, key_1 = seed & _WORD, high_word(seed)
    word_0, word_1 = stream & _WORD, high_word(stream)
    word_2, word_3 = stream * 0, stream * 0
    for _ in tl.static_range(_ROUNDS):
        product_0 = word_0 * tl.full((), _MULTIPLIER_0, tl.int64)
        product_1 = word_2 * tl.full((), _MULTIPLIER_1, tl.int64)
        word_0 = high_word(product_1) ^ word_1 ^ key_0
        word_1 = product_1 & _WORD
        word_2 = high_word(product_0) ^ word_3 ^ key_1
        word_3 = product_0 & _WORD
        key_0 = (key_0 + _KEY_STEP_0) & _WORD
        key_1 = (key_1 + _KEY_STEP_1) & _WORD
    return ((word_1 << 21) | (word_0 >> 11)).to(tl.float64) * _UNIT


@kernel(unaligned=("seeds_ptr", "streams_ptr"))
def uniforms_kernel(
    seeds_ptr: tl.tensor, streams_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.int64, ROWS: tl.constexpr
) -> None:
    """One program a block of rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    seed = tl.load(seeds_ptr + row, mask=here, other=0)
    stream = tl.load(streams_ptr + row, mask=here, other=0)
    tl.store(out_ptr + row, uniform_of(seed, stream), mask=here)


@kernel(unaligned=("weights_ptr",))
def chunk_sums_kernel(
    weights_ptr: tl.tensor, sums_ptr: tl.tensor, width: tl.int64, stride: tl.int64, CHUNK: tl.constexpr
) -> None:
    """One program a row and a chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = tl.load(weights_ptr + row * stride + token, mask=token < width, other=0)
    tl.store(sums_ptr + row * tl.num_programs(1) + chunk, tl.sum(weight, 0))


@kernel(unaligned=("weights_ptr", "status_ptr", "uniforms_ptr", "forced_ptr"))
def draw_kernel(
    weights_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    status_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    forced_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.int64,
    stride: tl.int64,
    chunks: tl.int64,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
    FORCED: tl.constexpr,
) -> None:
    """One program a row: the chunk in which the target lies, then the token within it."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, CHUNK_BLOCK)
    sums = tl.load(sums_ptr + row * chunks + number, mask=number < chunks, other=0)
    total = tl.sum(sums, 0)
    target = tl.floor(tl.load(uniforms_ptr + row) * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)
    through = tl.cumsum(sums, 0)
    chunk = tl.minimum(tl.sum((through <= target).to(tl.int32), 0), chunks.to(tl.int32) - 1)
    before = tl.sum(tl.where(number < chunk, sums, 0), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = tl.load(weights_ptr + row * stride + token, mask=token < width, other=0)
    drawn = chunk * CHUNK + tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    result = drawn.to(tl.int64)
    if FORCED:
        forced = tl.load(forced_ptr + row)
        result = tl.where(forced >= 0, forced, result)
    tl.store(out_ptr + row, tl.where(tl.load(status_ptr + row) == _OK, result, -1))


@kernel(unaligned=("forced_ptr",))
def greedy_kernel(
    largest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    forced_ptr: tl.tensor,
    out_ptr: tl.tensor,
    status_ptr: tl.tensor,
    chunks: tl.int64,
    CHUNK_BLOCK: tl.constexpr,
    FORCED: tl.constexpr,
) -> None:
    """One program a row whose whole mass lies on its best token."""
    row = tl.program_id(0).to(tl.int64)
    largest = row_largest(largest_ptr, row, chunks, CHUNK_BLOCK)
    status = row_status(largest)
    result = row_best_token(largest_ptr, token_ptr, row, chunks, largest, CHUNK_BLOCK).to(tl.int64)
    if FORCED:
        forced = tl.load(forced_ptr + row)
        result = tl.where(forced >= 0, forced, result)
    tl.store(out_ptr + row, tl.where(status == _OK, result, -1))
    tl.store(status_ptr + row, status)


@cache
def uniforms_configuration() -> Configuration:
    """Return the one configuration of random numbers."""
    signature = {**pointers(seeds_ptr=torch.int64, streams_ptr=torch.int64), "out_ptr": "*fp64", "rows": "i64"}
    return Configuration(uniforms_kernel, signature, {"ROWS": ROWS})


@cache
def sums_configuration(chunk: int) -> Configuration:
    """Return the configuration of sums of chunks of one length."""
    signature = pointers(weights_ptr=torch.int64, sums_ptr=torch.int64)
    return Configuration(
        chunk_sums_kernel, {**signature, "width": "i64", "stride": "i64"}, {"CHUNK": chunk}, warps_for(chunk)
    )


@cache
def draw_configuration(width: int, *, forced: bool) -> Configuration:
    """Return the configuration that draws from rows of one width."""
    whole = torch.int64
    signature = {**pointers(weights_ptr=whole, sums_ptr=whole, status_ptr=torch.int32), "uniforms_ptr": "*fp64"}
    signature |= pointers(forced_ptr=whole, out_ptr=whole) | dict.fromkeys(("width", "stride", "chunks"), "i64")
    constants = {**chunk_constants(width), "FORCED": forced}
    return Configuration(draw_kernel, signature, constants, warps_for(chunk_of(width)))


@cache
def greedy_configuration(width: int, *, forced: bool) -> Configuration:
    """Return the configuration that takes the best token of rows of one width."""
    signature = pointers(
        largest_ptr=torch.float32,
        token_ptr=torch.int32,
        forced_ptr=torch.int64,
        out_ptr=torch.int64,
        status_ptr=torch.int32,
    )
    constants = {"CHUNK_BLOCK": chunk_constants(width)["CHUNK_BLOCK"], "FORCED": forced}
    return Configuration(greedy_kernel, {**signature, "chunks": "i64"}, constants, num_warps=1)


def uniforms(seeds_B: Tensor, streams_B: Tensor) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.SamplingOps.uniforms`."""
    rows = seeds_B.shape[0]
    out_B = torch.empty(rows, dtype=torch.float64, device=seeds_B.device)
    launch(uniforms_configuration(), (-(-rows // ROWS),), seeds_B.contiguous(), streams_B.contiguous(), out_B, rows)
    return out_B


def chunk_sums(weights_BV: Tensor) -> Tensor:
    """Return the sums int64 [B, c] of given weights."""
    rows, width = weights_BV.shape
    sums_Bc = torch.empty((rows, chunks_of(width)), dtype=torch.int64, device=weights_BV.device)
    launch(sums_configuration(chunk_of(width)), tuple(sums_Bc.shape), weights_BV, sums_Bc, width, weights_BV.stride(0))
    return sums_Bc


def draw(weights_BV: Tensor, sums_Bc: Tensor, status_B: Tensor, uniforms_B: Tensor, forced_B: Tensor | None) -> Tensor:
    """Return int64 [B]: the drawn tokens, forced ones in their place, -1 where the status is not OK."""
    rows, width = weights_BV.shape
    out_B = torch.empty(rows, dtype=torch.int64, device=weights_BV.device)
    launch(
        draw_configuration(width, forced=forced_B is not None),
        (rows,),
        weights_BV,
        sums_Bc,
        status_B.contiguous(),
        uniforms_B.contiguous(),
        out_B if forced_B is None else forced_B.contiguous(),
        out_B,
        width,
        weights_BV.stride(0),
        sums_Bc.shape[1],
    )
    return out_B


def greedy(maxima: ChunkMaxima, width: int, forced_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the best tokens int64 [B] and the statuses int32 [B]."""
    rows, chunks = maxima.largest_Bc.shape
    device = maxima.largest_Bc.device
    out_B = torch.empty(rows, dtype=torch.int64, device=device)
    status_B = torch.empty(rows, dtype=torch.int32, device=device)
    chosen = greedy_configuration(width, forced=forced_B is not None)
    forced = out_B if forced_B is None else forced_B.contiguous()
    launch(chosen, (rows,), *maxima, forced, out_B, status_B, chunks)
    return out_B, status_B
