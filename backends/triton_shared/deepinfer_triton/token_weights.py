"""Integer probabilities of tokens: maxima of chunks, exponentials in float64, filters, sums of chunks.

A row is cut into chunks, one program each, so that one row fills a device and no program holds 129,280 values. What
chunks hand over are maxima and integer sums, exact in any order. ``exp`` is the only inexact step, within 1 ulp of
float64; it sees nothing but its own element.

Legend: B rows, V vocabulary, c chunks.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS, RowStatus
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import device_function, kernel

LARGEST_CHUNK = 4096
LEAST_CHUNK = 16

_INFINITY = tl.constexpr(float("inf"))
_LARGEST_WEIGHT = tl.constexpr(2.0**WEIGHT_BITS)
_OK = tl.constexpr(int(RowStatus.OK))
_NAN = tl.constexpr(int(RowStatus.NAN))
_EMPTY = tl.constexpr(int(RowStatus.EMPTY))
_NO_TOKEN = tl.constexpr(2**31 - 1)


@kernel(unaligned=("logits_ptr",))
def chunk_maxima_kernel(
    logits_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    width: tl.int64,
    stride: tl.int64,
    CHUNK: tl.constexpr,
) -> None:
    """One program a row and a chunk: its largest logit (+inf if it holds NaN) and the lowest token that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < width, other=0.0 - _INFINITY)
    x = tl.where(x != x, _INFINITY, x)
    largest = tl.max(x, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(largest_ptr + place, largest)
    tl.store(token_ptr + place, tl.min(tl.where((x == largest) & (token < width), token, _NO_TOKEN), 0))


@device_function
def row_largest(largest_ptr: tl.tensor, row: tl.tensor, chunks: tl.tensor, CHUNK_BLOCK: tl.constexpr) -> tl.tensor:
    """Return a row's largest logit; +inf if it holds NaN."""
    chunk = tl.arange(0, CHUNK_BLOCK)
    return tl.max(tl.load(largest_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0 - _INFINITY), 0)


@device_function
def row_best_token(
    largest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    row: tl.tensor,
    chunks: tl.tensor,
    largest: tl.tensor,
    CHUNK_BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the lowest token that has the row's largest logit."""
    chunk = tl.arange(0, CHUNK_BLOCK)
    inside = chunk < chunks
    found = tl.load(largest_ptr + row * chunks + chunk, mask=inside, other=0.0 - _INFINITY)
    token = tl.load(token_ptr + row * chunks + chunk, mask=inside, other=_NO_TOKEN)
    return tl.min(tl.where(found == largest, token, _NO_TOKEN), 0)


@device_function
def row_status(largest: tl.tensor) -> tl.tensor:
    """Return the status that the largest logit says."""
    status = tl.where(largest == 0.0 - _INFINITY, _EMPTY, _OK)
    return tl.where(largest == _INFINITY, _NAN, status)


@device_function
def exponential(x: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return float64 ``exp((x - largest) / temperature)``: subtraction first, then division."""
    return tl.exp((x.to(tl.float64) - largest.to(tl.float64)) / temperature)


@kernel(unaligned=("logits_ptr", "temperature_ptr"))
def token_weights_kernel(
    logits_ptr: tl.tensor,
    largest_ptr: tl.tensor,
    token_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    status_ptr: tl.tensor,
    width: tl.int64,
    stride: tl.int64,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
) -> None:
    """One program a row and a chunk: weights before any filter, their sum, and the row's status."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    largest = row_largest(largest_ptr, row, chunks, CHUNK_BLOCK)
    status = row_status(largest)
    temperature = tl.load(temperature_ptr + row)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < width
    if temperature == 0.0:
        best = row_best_token(largest_ptr, token_ptr, row, chunks, largest, CHUNK_BLOCK)
        weight = tl.where(token == best, _LARGEST_WEIGHT, 0.0).to(tl.int64)
    else:
        x = tl.load(logits_ptr + row * stride + token, mask=inside, other=0.0 - _INFINITY)
        weight = (exponential(x, largest, temperature) * _LARGEST_WEIGHT).to(tl.int64)
    weight = tl.where((status == _OK) & inside, weight, 0)
    tl.store(weights_ptr + row * width + token, weight, mask=inside)
    tl.store(sums_ptr + row * chunks + chunk, tl.sum(weight, 0))
    if chunk == 0:
        tl.store(status_ptr + row, status)


@kernel(unaligned=("min_weight_ptr",))
def weight_filter_kernel(
    weights_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    least_ptr: tl.tensor,
    last_ptr: tl.tensor,
    min_weight_ptr: tl.tensor,
    width: tl.int64,
    CHUNK: tl.constexpr,
) -> None:
    """One program a row and a chunk: weights below the row's thresholds become 0, in place."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < width
    weight = tl.load(weights_ptr + row * width + token, mask=inside, other=0)
    least, last = tl.load(least_ptr + row), tl.load(last_ptr + row)
    kept = (weight > least) | ((weight == least) & (token <= last))
    weight = tl.where(kept & (weight >= tl.load(min_weight_ptr + row)), weight, 0)
    tl.store(weights_ptr + row * width + token, weight, mask=inside)
    tl.store(sums_ptr + row * tl.num_programs(1) + chunk, tl.sum(weight, 0))


def chunk_of(width: int) -> int:
    """Return how many tokens a chunk of such a row has."""
    return min(LARGEST_CHUNK, max(LEAST_CHUNK, power_of_two(width)))


def chunks_of(width: int) -> int:
    """Return how many chunks a row has."""
    return -(-width // chunk_of(width))


def chunk_constants(width: int) -> dict[str, int | bool]:
    """Return the constants of kernels that read maxima or sums of chunks."""
    return {"CHUNK": chunk_of(width), "CHUNK_BLOCK": power_of_two(chunks_of(width))}


@cache
def maxima_configuration(chunk: int) -> Configuration:
    """Return the configuration of maxima of chunks of one length."""
    signature = pointers(logits_ptr=torch.float32, largest_ptr=torch.float32, token_ptr=torch.int32)
    return Configuration(
        chunk_maxima_kernel, {**signature, "width": "i64", "stride": "i64"}, {"CHUNK": chunk}, warps_for(chunk)
    )


@cache
def weights_configuration(width: int) -> Configuration:
    """Return the configuration of weights for rows of one width."""
    signature = pointers(logits_ptr=torch.float32, largest_ptr=torch.float32, token_ptr=torch.int32)
    signature |= {"temperature_ptr": "*fp64"}
    signature |= pointers(weights_ptr=torch.int64, sums_ptr=torch.int64, status_ptr=torch.int32)
    signature |= {"width": "i64", "stride": "i64"}
    return Configuration(token_weights_kernel, signature, chunk_constants(width), warps_for(chunk_of(width)))


@cache
def filter_configuration(chunk: int) -> Configuration:
    """Return the configuration of filters for chunks of one length."""
    whole = torch.int64
    signature = pointers(weights_ptr=whole, sums_ptr=whole, least_ptr=whole, last_ptr=whole, min_weight_ptr=whole)
    return Configuration(weight_filter_kernel, {**signature, "width": "i64"}, {"CHUNK": chunk}, warps_for(chunk))


class ChunkMaxima(NamedTuple):
    """Largest logits float32 [B, c] and their tokens int32 [B, c]."""

    largest_Bc: Tensor
    token_Bc: Tensor


class ChunkWeights(NamedTuple):
    """Weights int64 [B, V], their sums int64 [B, c], statuses int32 [B]."""

    weights_BV: Tensor
    sums_Bc: Tensor
    status_B: Tensor


def chunk_maxima(logits_BV: Tensor) -> ChunkMaxima:
    """Return each chunk's largest logit and the lowest token that has it."""
    rows, width = logits_BV.shape
    chunks = chunks_of(width)
    largest_Bc = torch.empty((rows, chunks), dtype=torch.float32, device=logits_BV.device)
    token_Bc = torch.empty((rows, chunks), dtype=torch.int32, device=logits_BV.device)
    launch(
        maxima_configuration(chunk_of(width)), (rows, chunks), logits_BV, largest_Bc, token_Bc, width,
        logits_BV.stride(0),
    )  # fmt: skip
    return ChunkMaxima(largest_Bc, token_Bc)


def unfiltered_weights(logits_BV: Tensor, maxima: ChunkMaxima, temperature_B: Tensor) -> ChunkWeights:
    """Return the weights that temperature alone gives."""
    rows, width = logits_BV.shape
    chunks, device = chunks_of(width), logits_BV.device
    found = ChunkWeights(
        torch.empty((rows, width), dtype=torch.int64, device=device),
        torch.empty((rows, chunks), dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )
    launch(
        weights_configuration(width), (rows, chunks), logits_BV, *maxima, temperature_B.contiguous(), *found,
        width, logits_BV.stride(0),
    )  # fmt: skip
    return found


def filter_weights(found: ChunkWeights, least_B: Tensor, last_B: Tensor, min_weight_B: Tensor) -> None:
    """Zero, in place, what lies below the thresholds: weight, last token of that weight, least weight by min-p."""
    rows, width = found.weights_BV.shape
    grid = (rows, found.sums_Bc.shape[1])
    launch(
        filter_configuration(chunk_of(width)), grid, found.weights_BV, found.sums_Bc, least_B, last_B,
        min_weight_B.contiguous(), width,
    )  # fmt: skip
