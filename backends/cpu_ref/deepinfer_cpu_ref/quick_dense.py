"""Draws from rows of which nearly every token matters, a few readings of the logits each.

Two ways. Without filters a draw needs only to know on which side of its target each partial sum lies: sums of an
approximation decide that whenever the target is farther from the chosen token's ends than the approximation can be off.
In float32 that is true of nine rows in ten or so, in float64 of nearly all others; what neither can decide is left to
the second way. It computes the weights themselves. Kept in
float64 they stay exact integers, and so do their sums, in any order. The cut of top-p is found without sorting the row
(`deepinfer_cpu_ref.quick_cut`).

Legend: B all rows, R rows of a group, V vocabulary, N blocks of a row, C tokens of a block, M entries of a list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS
from deepinfer_cpu_ref.quick_blocks import BlockedRows, DrawnRows
from deepinfer_cpu_ref.quick_cut import CutSettings, Guesser, SampledGuess, cut_row, guess_everything, keys
from deepinfer_cpu_ref.quick_scratch import Scratch

UNDECIDED = -2
"""Stands for the token of a row that a quick way could not decide."""
WIDEST_VOCABULARY = 2**21
"""Sums of this many weights stay below 2**53, so that float64 holds them exactly."""

_UNIT = 2.0**-WEIGHT_BITS
_LARGEST_EXPONENT = 500.0
_LARGEST_EXPONENT_32 = 60.0
_FLOAT32_ROUNDING = 2.0**-24
_ROOM = 1.01
"""More than what the roundings of the bounds themselves can come to."""
_PIECE_ELEMENTS = 2**19


def draw_dense(blocked: BlockedRows, drawn: DrawnRows, vocabulary: int, scratch: Scratch) -> torch.Tensor:
    """Return the tokens (int64 [R]) of some rows; `UNDECIDED` for those with a top-k, which have no way here."""
    rows = drawn.settings
    tokens_R = torch.full_like(drawn.rows_R, UNDECIDED)
    has_no_top_k_R = (rows.top_k_B == 0) | (rows.top_k_B >= vocabulary)
    plain_M = (has_no_top_k_R & (rows.top_p_B >= 1) & (rows.min_weight_B == 0)).nonzero()[:, 0]
    if len(plain_M):
        tokens_R[plain_M] = _draw_unfiltered(blocked, drawn.select(plain_M), scratch)
    guessers: tuple[Guesser, ...] = (SampledGuess.of, guess_everything)
    for guesser in guessers:
        undecided_M = (has_no_top_k_R & (tokens_R == UNDECIDED)).nonzero()[:, 0]
        if len(undecided_M):
            tokens_R[undecided_M] = _draw_exactly(blocked, drawn.select(undecided_M), guesser, scratch)
    return tokens_R


def _draw_unfiltered(blocked: BlockedRows, drawn: DrawnRows, scratch: Scratch) -> torch.Tensor:
    tokens_R = torch.full_like(drawn.rows_R, UNDECIDED)
    for shares_of in (_narrow_shares, _wide_shares):
        places_M = (tokens_R == UNDECIDED).nonzero()[:, 0]
        if len(places_M):
            part = drawn.select(places_M)
            scale_M = math.log2(math.e) / part.settings.temperature_B
            tokens_R[places_M] = _draw_by_shares(blocked, part, scale_M, shares_of(blocked, part, scale_M, scratch))
    return tokens_R


class _Shares(NamedTuple):
    """Powers of two, in proportion to the weights, as sums of each block, and how far they may be off.

    Attributes:
        sums_RN: float64 [R, N].
        relative_R: float64 [R], error of any partial sum in proportion to it.
        absolute_R: float64 [R], error of any partial sum beside that.
        is_usable_R: bool [R]; the others are out of range.
    """

    sums_RN: torch.Tensor
    relative_R: torch.Tensor
    absolute_R: torch.Tensor
    is_usable_R: torch.Tensor


def _narrow_shares(blocked: BlockedRows, drawn: DrawnRows, scale_R: torch.Tensor, scratch: Scratch) -> _Shares:
    """Take the powers in float32, three times as fast as in float64, and add them up in float64."""
    count, width = blocked.logits_BNC.shape[1:]
    scale32_R = scale_R.to(torch.float32)
    sums_RN = scratch.take("sums", (len(drawn.rows_R), count), torch.float64)
    for start, stop, exponents_RNC in _pieces(blocked, drawn.rows_R, scratch, scale32_R):
        shares_RNC = scratch.take("wide", tuple(exponents_RNC.shape), torch.float64).copy_(exponents_RNC.exp2_())
        torch.sum(shares_RNC, -1, out=sums_RN[start:stop])
    # A power is off by its last place, an exponent by the rounding of its factor and its own. Times the power, that of
    # a negative exponent counts for less than 0.54.
    exponent_R = blocked.largest_B[drawn.rows_R] * scale_R
    off_R = (((scale32_R - scale_R) / scale_R).abs() + _FLOAT32_ROUNDING) * (math.log(2.0) * _ROOM)
    relative_R = exponent_R.clamp(min=0) * off_R + 2 * _FLOAT32_ROUNDING * _ROOM
    return _Shares(sums_RN, relative_R, off_R * (0.54 * count * width), exponent_R.abs() < _LARGEST_EXPONENT_32)


def _wide_shares(blocked: BlockedRows, drawn: DrawnRows, scale_R: torch.Tensor, scratch: Scratch) -> _Shares:
    """Take the powers in float64: their errors are among those that every way allows for."""
    sums_RN = scratch.take("sums", (len(drawn.rows_R), blocked.logits_BNC.shape[1]), torch.float64)
    for start, stop, exponents_RNC in _pieces(blocked, drawn.rows_R, scratch, scale_R):
        torch.sum(exponents_RNC.exp2_(), -1, out=sums_RN[start:stop])
    exponent_R = blocked.largest_B[drawn.rows_R] * scale_R
    none_R = torch.zeros_like(scale_R)
    return _Shares(sums_RN, none_R, none_R, exponent_R.abs() < _LARGEST_EXPONENT)


def _draw_by_shares(blocked: BlockedRows, drawn: DrawnRows, scale_R: torch.Tensor, shares: _Shares) -> torch.Tensor:
    count, width = blocked.logits_BNC.shape[1:]
    sums_RN = shares.sums_RN
    through_RN = sums_RN.cumsum(-1)
    total_R = through_RN[:, -1]
    target_R1 = (drawn.uniforms_R * total_R)[:, None]
    block_R1 = torch.searchsorted(through_RN, target_R1, right=True).clamp(max=count - 1)
    shares_RC = blocked.logits_BNC[drawn.rows_R, block_R1[:, 0]].to(torch.float64).mul_(scale_R[:, None]).exp2_()
    before_R1 = through_RN.gather(1, block_R1) - sums_RN.gather(1, block_R1)
    through_RC = before_R1 + shares_RC.cumsum(-1)
    place_R1 = torch.searchsorted(through_RC, target_R1, right=True).clamp(max=width - 1)
    end_R1 = through_RC.gather(1, place_R1)
    begin_R1 = end_R1 - shares_RC.gather(1, place_R1)
    # A weight is the floor of its share: the shares are too large by less than a unit each. Their own error, and that
    # of the exponential of the definition, are a few roundings of exponents below 2**10; sums round V times.
    exponent_R = blocked.largest_B[drawn.rows_R] * scale_R
    vocabulary = count * width
    room_R = exponent_R.exp2() * _UNIT * (vocabulary + 4) + total_R * 2.0**-53 * (2 * vocabulary + 2**14)
    # The sum before the token is off, and so is the target, which is a part of the whole.
    room_R += 2 * shares.absolute_R + shares.relative_R * (begin_R1 + target_R1)[:, 0]
    distance_R = torch.minimum(target_R1 - begin_R1, end_R1 - target_R1)[:, 0]
    is_certain_R = (distance_R > room_R) & shares.is_usable_R
    return torch.where(is_certain_R, (block_R1 * width + place_R1)[:, 0], UNDECIDED)


def _draw_exactly(blocked: BlockedRows, drawn: DrawnRows, guesser: Guesser, scratch: Scratch) -> torch.Tensor:
    count, width = blocked.logits_BNC.shape[1:]
    rows = drawn.settings
    largest_R, least_weight_R = blocked.largest_B[drawn.rows_R], rows.min_weight_B.clamp(min=1)
    sums_RN = scratch.take("sums", (len(drawn.rows_R), count), torch.float64).zero_()
    least_key_R = torch.full_like(drawn.rows_R, UNDECIDED)
    columns = (largest_R, rows.temperature_B, rows.top_p_B, least_weight_R)
    cut_settings = list(map(CutSettings, *(column_R.tolist() for column_R in columns)))
    places: list[int] = drawn.rows_R.tolist()
    flags_2V = scratch.take("flags", (2, count * width), torch.bool).numpy()
    for start, stop, piece_RNC in _pieces(blocked, drawn.rows_R, scratch):
        weights_RNC = _weights(piece_RNC, largest_R[start:stop], rows.temperature_B[start:stop])
        for place, weights_NC in enumerate(weights_RNC, start):
            cut = cut_row(weights_NC, blocked.logits_BNC[places[place]], cut_settings[place], guesser, flags_2V)
            if cut is not None:
                sums_RN[place], least_key_R[place] = cut.sums_N, cut.least_key
    through_RN = sums_RN.cumsum(-1)
    total_R = through_RN[:, -1]
    target_R1 = torch.minimum((drawn.uniforms_R * total_R).floor(), total_R - 1)[:, None]
    block_R1 = torch.searchsorted(through_RN, target_R1, right=True).clamp(max=count - 1)
    inside_RC = blocked.logits_BNC[drawn.rows_R, block_R1[:, 0]].to(torch.float64)
    weights_RC = _weights(inside_RC[:, :, None], largest_R, rows.temperature_B)[:, :, 0].to(torch.int64)
    is_kept_RC = keys(weights_RC, block_R1 * width + torch.arange(width)) >= least_key_R[:, None]
    is_kept_RC &= weights_RC >= least_weight_R[:, None]
    before_R1 = through_RN.gather(1, block_R1) - sums_RN.gather(1, block_R1)
    through_RC = before_R1 + torch.where(is_kept_RC, weights_RC, 0).cumsum(-1)
    place_R1 = torch.searchsorted(through_RC, target_R1, right=True)
    return torch.where(least_key_R == UNDECIDED, UNDECIDED, (block_R1 * width + place_R1)[:, 0])


def _weights(logits_RNC: torch.Tensor, largest_R: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    """Turn float64 logits into weights, in place."""
    logits_RNC.sub_(largest_R[:, None, None])
    if bool((temperature_R != 1).any()):
        logits_RNC.div_(temperature_R[:, None, None])
    # Dividing by a power of two and dropping the fraction is the floor of the product, in one pass.
    return torch.div(logits_RNC.exp_(), _UNIT, rounding_mode="trunc", out=logits_RNC)


def _pieces(
    blocked: BlockedRows, rows_R: torch.Tensor, scratch: Scratch, factor_R: torch.Tensor | None = None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield ranges of the rows and a copy of their logits, which lives until the next.

    Copies are float64, or of the dtype of ``factor_R`` and multiplied with it.
    """
    count, width = blocked.logits_BNC.shape[1:]
    step = max(1, _PIECE_ELEMENTS // (count * width))
    dtype = torch.float64 if factor_R is None else factor_R.dtype
    room_RNC = scratch.take("piece", (min(step, len(rows_R)), count, width), dtype)
    places: list[int] = rows_R.tolist()
    for start in range(0, len(places), step):
        stop = min(start + step, len(places))
        first, last = places[start], places[stop - 1]
        piece_RNC = room_RNC[: stop - start]
        factor_R11 = None if factor_R is None else factor_R[start:stop, None, None]
        # Rows ascend: a run of neighbours is converted at once, and nothing is gathered before it is converted.
        is_run = last - first == stop - 1 - start
        if is_run and factor_R11 is not None and dtype == torch.float32:
            torch.mul(blocked.logits_BNC[first : last + 1], factor_R11, out=piece_RNC)
            factor_R11 = None
        elif is_run:
            piece_RNC.copy_(blocked.logits_BNC[first : last + 1])
        else:
            for row_NC, place in zip(piece_RNC, places[start:stop], strict=True):
                row_NC.copy_(blocked.logits_BNC[place])
        if factor_R11 is not None:
            piece_RNC.mul_(factor_R11)
        yield start, stop, piece_RNC
