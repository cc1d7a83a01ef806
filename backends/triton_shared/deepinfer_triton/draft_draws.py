"""Drafts: what a draft was drawn from, packed, and the guess of the target's own draw; integers but for one root.

Legend: B rows, V vocabulary, c chunks, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.drafting import PLACEHOLDER
from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer_triton.configuration import Configuration, launch, pointers, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.token_weights import ChunkWeights, chunk_constants, chunk_of

_OK = tl.constexpr(int(RowStatus.OK))
_PLACEHOLDER = tl.constexpr(PLACEHOLDER)


@kernel()
def kept_tokens_kernel(
    weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    width: tl.int64,
    capacity: tl.int64,
    CHUNK: tl.constexpr,
) -> None:
    """One program a row: the tokens with mass, in ascending order, then placeholders without mass."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, CHUNK)
    ids_row, kept_row = ids_ptr + row * capacity, kept_ptr + row * capacity
    count = tl.full((), 0, tl.int64)
    for start in range(0, width, CHUNK):
        token = start + number
        weight = tl.load(weights_ptr + row * width + token, mask=token < width, other=0)
        has_mass = (weight > 0).to(tl.int64)
        place = count + tl.cumsum(has_mass, 0) - 1
        fits = (weight > 0) & (place < capacity)
        tl.store(ids_row + place, token.to(tl.int64), mask=fits)
        tl.store(kept_row + place, weight, mask=fits)
        count += tl.sum(has_mass, 0)
    for start in range(0, capacity, CHUNK):
        place = start + number
        free = (place >= count) & (place < capacity)
        tl.store(ids_row + place, tl.full((CHUNK,), _PLACEHOLDER, tl.int64), mask=free)
        tl.store(kept_row + place, tl.zeros((CHUNK,), tl.int64), mask=free)


@kernel(unaligned=("uniforms_ptr",))
def guess_kernel(
    weights_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    status_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    reach_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.int64,
    chunks: tl.int64,
    CHUNK: tl.constexpr,
    CHUNK_BLOCK: tl.constexpr,
) -> None:
    """One program a row: of the tokens around the target of its draw, the one that shares most with the reach."""
    row = tl.program_id(0).to(tl.int64)
    chunk_number = tl.arange(0, CHUNK_BLOCK)
    sums = tl.load(sums_ptr + row * chunks + chunk_number, mask=chunk_number < chunks, other=0)
    total = tl.sum(sums, 0)
    uniform = tl.load(uniforms_ptr + row)
    target = tl.minimum(tl.floor(uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    spread = tl.load(reach_ptr) * tl.sqrt(uniform * (1.0 - uniform))
    distance = tl.floor(spread * total.to(tl.float64)).to(tl.int64)
    low, high = target - distance, target + distance + 1
    most = tl.full((), -1, tl.int64)
    best = tl.full((), 0, tl.int64)
    before = tl.full((), 0, tl.int64)
    for chunk in range(chunks):
        size = tl.load(sums_ptr + row * chunks + chunk)
        if (before < high) & (before + size > low):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            weight = tl.load(weights_ptr + row * width + token, mask=token < width, other=0)
            ends = before + tl.cumsum(weight, 0)
            shared = tl.minimum(ends, high) - tl.maximum(ends - weight, low)
            # Without mass there is no interval to share; the token that holds the target shares at least 1.
            shared = tl.where(weight > 0, shared, -1)
            largest = tl.max(shared, 0)
            lowest = tl.min(tl.where(shared == largest, token, width), 0)
            best = tl.where(largest > most, lowest, best)
            most = tl.maximum(largest, most)
        before += size
    tl.store(out_ptr + row, tl.where(tl.load(status_ptr + row) == _OK, best, _PLACEHOLDER))


@cache
def kept_configuration(chunk: int) -> Configuration:
    """Return the configuration that packs rows in chunks of one length."""
    signature = pointers(weights_ptr=torch.int64, ids_ptr=torch.int64, kept_ptr=torch.int64)
    return Configuration(
        kept_tokens_kernel, {**signature, "width": "i64", "capacity": "i64"}, {"CHUNK": chunk}, warps_for(chunk)
    )


@cache
def guess_configuration(width: int) -> Configuration:
    """Return the configuration that guesses in rows of one width."""
    signature = pointers(weights_ptr=torch.int64, sums_ptr=torch.int64, status_ptr=torch.int32)
    signature |= {"uniforms_ptr": "*fp64", "reach_ptr": "*fp64", "out_ptr": "*i64", "width": "i64", "chunks": "i64"}
    return Configuration(guess_kernel, signature, chunk_constants(width), warps_for(chunk_of(width)))


def configurations(width: int) -> Iterator[Configuration]:
    """Yield what drafts over one vocabulary use."""
    yield kept_configuration(chunk_of(width))
    yield guess_configuration(width)


def kept_tokens(weights_BV: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the ids int64 [B, K], ascending and then -1, and the weights int64 [B, K] of the tokens with mass."""
    rows, width = weights_BV.shape
    ids_BK, kept_BK = (torch.empty((rows, capacity), dtype=torch.int64, device=weights_BV.device) for _ in range(2))
    launch(kept_configuration(chunk_of(width)), (rows,), weights_BV, ids_BK, kept_BK, width, capacity)
    return ids_BK, kept_BK


def guess(weights: ChunkWeights, uniforms_B: Tensor, reach: float) -> Tensor:
    """Return int64 [B]: the guessed tokens, -1 where the status is not OK."""
    rows, width = weights.weights_BV.shape
    out_B = torch.empty(rows, dtype=torch.int64, device=weights.weights_BV.device)
    # Triton would round a number to float32.
    reach_1 = torch.full((1,), reach, dtype=torch.float64, device=out_B.device)
    launch(
        guess_configuration(width), (rows,), weights.weights_BV, weights.sums_Bc, weights.status_B, uniforms_B,
        reach_1, out_B, width, weights.sums_Bc.shape[1],
    )  # fmt: skip
    return out_B
