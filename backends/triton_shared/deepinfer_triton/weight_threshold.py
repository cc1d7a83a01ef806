"""Where top-k and top-p cut a row: a weight, and the last token among those that have exactly this weight.

The cut is found digit by digit, highest first: for sixteen candidates at once, how many weights are not below each
(top-k) or what they sum up to (top-p). Counts and sums are integers, so that no order matters and nothing is sorted.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer_triton.configuration import Configuration, launch, pointers
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.token_weights import chunk_of

LARGEST_BLOCK = 1024
LARGEST_WARPS = 16

_DIGITS = tl.constexpr(8)
_DIGIT_BITS = tl.constexpr(4)
_CANDIDATES = tl.constexpr(16)
_ALL = tl.constexpr(2**62)
"""More than any row has tokens, or any row's weights sum up to."""


@device_function
def largest_cut(
    weights_row: tl.tensor, width: tl.tensor, goal: tl.tensor, BY_SUM: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the largest v for which weights of at least v are ``goal`` many, or sum up to it; 0 if none is."""
    cut = tl.full((), 0, tl.int64)
    candidate = tl.arange(0, _CANDIDATES).to(tl.int64)
    for digit in range(_DIGITS):
        shift = (_DIGITS - 1 - digit) * _DIGIT_BITS
        bound = cut + (candidate << shift)
        found = tl.zeros((BLOCK, _CANDIDATES), tl.int64)
        for start in range(0, width, BLOCK):
            token = start + tl.arange(0, BLOCK)
            weight = tl.load(weights_row + token, mask=token < width, other=-1)
            if BY_SUM:
                found += tl.where(weight[:, None] >= bound[None, :], weight[:, None], 0)
            else:
                found += (weight[:, None] >= bound[None, :]).to(tl.int64)
        reached = (tl.sum(found, 0) >= goal).to(tl.int64)
        # Candidates that reach the goal are the lowest ones; the first does because the digits before did.
        cut += tl.maximum(tl.sum(reached, 0) - 1, 0) << shift
    return cut


@device_function
def count_above(weights_row: tl.tensor, width: tl.tensor, cut: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return how many weights lie above."""
    count = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, width, BLOCK):
        token = start + tl.arange(0, BLOCK)
        count += (tl.load(weights_row + token, mask=token < width, other=-1) > cut).to(tl.int64)
    return tl.sum(count, 0)


@device_function
def sum_above(weights_row: tl.tensor, width: tl.tensor, cut: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return what weights above sum up to."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, width, BLOCK):
        token = start + tl.arange(0, BLOCK)
        weight = tl.load(weights_row + token, mask=token < width, other=-1)
        total += tl.where(weight > cut, weight, 0)
    return tl.sum(total, 0)


@device_function
def last_of_equals(
    weights_row: tl.tensor, width: tl.tensor, cut: tl.tensor, wanted: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the token of the ``wanted``-th weight that equals the cut; the width if there are fewer."""
    before = tl.full((), 0, tl.int64)
    last = width
    for start in range(0, width, BLOCK):
        token = start + tl.arange(0, BLOCK)
        equal = tl.load(weights_row + token, mask=token < width, other=-1) == cut
        rank = before + tl.cumsum(equal.to(tl.int64), 0)
        last = tl.minimum(last, tl.min(tl.where(equal & (rank == wanted), token, width), 0))
        before += tl.sum(equal.to(tl.int64), 0)
    return last


@kernel(unaligned=("top_k_ptr", "top_p_ptr"))
def weight_threshold_kernel(
    weights_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    least_ptr: tl.tensor,
    last_ptr: tl.tensor,
    width: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row; rows without a filter read nothing."""
    row = tl.program_id(0).to(tl.int64)
    weights_row = weights_ptr + row * width
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    least = tl.full((), 0, tl.int64)
    equals = tl.full((), _ALL, tl.int64)
    last = width
    has_top_k = (top_k > 0) & (top_k < width)
    if has_top_k:
        least = largest_cut(weights_row, width, top_k, False, BLOCK)  # noqa: FBT003 - Triton passes by position
        equals = top_k - count_above(weights_row, width, least, BLOCK)
    if top_p < 1.0:
        kept = sum_above(weights_row, width, least, BLOCK)
        if has_top_k:
            kept += equals * least
        limit = tl.floor(top_p * kept.to(tl.float64)).to(tl.int64)
        cut = largest_cut(weights_row, width, limit + 1, True, BLOCK)  # noqa: FBT003 - as above
        if (cut >= least) & (cut > 0):
            wanted = (limit - sum_above(weights_row, width, cut, BLOCK)) // cut + 1
            equals = tl.where(cut == least, tl.minimum(equals, wanted), wanted)
            least = cut
    if least > 0:
        last = last_of_equals(weights_row, width, least, equals, BLOCK)
    tl.store(least_ptr + row, least)
    tl.store(last_ptr + row, last)


@cache
def configuration(block: int) -> Configuration:
    """Return the configuration that reads blocks of so many tokens."""
    whole = torch.int64
    signature = {**pointers(weights_ptr=whole, top_k_ptr=whole), "top_p_ptr": "*fp64"}
    signature |= {**pointers(least_ptr=whole, last_ptr=whole), "width": "i64"}
    return Configuration(weight_threshold_kernel, signature, {"BLOCK": block}, max(1, min(LARGEST_WARPS, block // 64)))


def block_of(width: int) -> int:
    """Return how many tokens of a row are read at once."""
    return min(LARGEST_BLOCK, chunk_of(width))


class Thresholds(NamedTuple):
    """The least weight int64 [B] that stays, and the last token int64 [B] of exactly that weight that does."""

    least_B: Tensor
    last_B: Tensor


def thresholds(weights_BV: Tensor, rows: SamplingRows) -> Thresholds:
    """Return where top-k, then top-p, cut each row of weights before any filter."""
    count, width = weights_BV.shape
    least_B, last_B = (torch.empty(count, dtype=torch.int64, device=weights_BV.device) for _ in range(2))
    launch(
        configuration(block_of(width)),
        (count,),
        weights_BV,
        rows.top_k_B.contiguous(),
        rows.top_p_B.contiguous(),
        least_B,
        last_B,
        width,
    )
    return Thresholds(least_B, last_B)
