"""From exact weights in float64 to a token: the cut of top-p and min-p without sorting a row, then the draw.

A sample of a row says between which two weights its cut must lie. What weighs more is kept, what weighs less is not,
and only the tokens in between are sorted. The sums are of all tokens and exact, so they prove whether the guess was
right; where it was not, the row is left to somebody who sorts it.

Legend: R rows, V vocabulary, N blocks of a row, C tokens of a block, S tokens of a sample, M tokens around the cuts, W
the most of them in one row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS, SamplingRows

UNDECIDED = -2
"""Stands for the token of a row that a quick way could not decide."""
WIDEST_VOCABULARY = 2**21
"""Sums of this many weights stay below 2**53, so that float64 holds them exactly."""

_ID_BITS = 31
_LARGEST_ID = 2**_ID_BITS - 1
_ABOVE_ALL = 2.0 ** (WEIGHT_BITS + 1)
_SAMPLE_STRIDE = 31
_SAMPLE_DEVIATIONS = 4.0


@dataclass(slots=True)
class Scratch:
    """Two float64 tensors that are used again from piece to piece."""

    _kept: list[torch.Tensor] = field(default_factory=list)

    def like(self, weights_RNC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors of that shape, holding anything."""
        if not self._kept or len(self._kept[0]) < len(weights_RNC):
            self._kept = [torch.empty_like(weights_RNC) for _ in range(2)]
        first, second = (tensor[: len(weights_RNC)] for tensor in self._kept)
        return first, second


@dataclass(frozen=True, slots=True)
class _Cut:
    """What stays of each row.

    Attributes:
        sums_RN: float64 [R, N], the kept weight of each block.
        least_key_R: int64 [R]; tokens with a lower key are out (`_keys`).
        is_proven_R: bool [R]; False where the guess failed.
    """

    sums_RN: torch.Tensor
    least_key_R: torch.Tensor
    is_proven_R: torch.Tensor


def draw_weights(
    weights_RNC: torch.Tensor, rows: SamplingRows, uniforms_R: torch.Tensor, scratch: Scratch
) -> torch.Tensor:
    """Return the tokens (int64 [R]) of rows whose weights before top-p these are, or `UNDECIDED`.

    Args:
        weights_RNC: float64, whole numbers of at most 2**31, ids in order.
        rows: top-p and min-p of the rows; other settings are not looked at.
        uniforms_R: the draws.
        scratch: memory for the work.
    """
    least_weight_R = rows.min_weight_B.clamp(min=1)
    if bool((rows.top_p_B < 1).any()):
        cut = _cut_by_top_p(weights_RNC, rows, least_weight_R, scratch)
    else:
        is_whole = bool((least_weight_R == 1).all())
        sums_RN = weights_RNC.sum(-1) if is_whole else _sums_from(weights_RNC, least_weight_R, scratch)
        cut = _Cut(sums_RN, least_weight_R << _ID_BITS, torch.ones_like(least_weight_R, dtype=torch.bool))
    count, width = weights_RNC.shape[1:]
    through_RN = cut.sums_RN.cumsum(-1)
    total_R = through_RN[:, -1]
    target_R1 = torch.minimum((uniforms_R * total_R).floor(), total_R - 1)[:, None]
    block_R1 = (through_RN <= target_R1).sum(-1, keepdim=True).clamp(max=count - 1)
    weights_RC = weights_RNC.gather(1, block_R1[:, :, None].expand(-1, -1, width))[:, 0].to(torch.int64)
    is_kept_RC = _keys(weights_RC, block_R1 * width + torch.arange(width)) >= cut.least_key_R[:, None]
    is_kept_RC &= weights_RC >= least_weight_R[:, None]
    before_R1 = through_RN.gather(1, block_R1) - cut.sums_RN.gather(1, block_R1)
    place_R = (before_R1 + torch.where(is_kept_RC, weights_RC, 0).cumsum(-1) <= target_R1).sum(-1)
    return torch.where(cut.is_proven_R, block_R1[:, 0] * width + place_R, UNDECIDED)


def keep_by_top_p(weights_RV: torch.Tensor, top_p_R: torch.Tensor) -> None:
    """Set to 0, in place, what top-p removes from integer weights (int64 [R, V]), by sorting whole rows."""
    rows_M = (top_p_R < 1).nonzero()[:, 0]
    weights_MV = weights_RV[rows_M]
    limit_M = (top_p_R[rows_M] * weights_MV.sum(-1)).floor()
    keys_MV = _keys(weights_MV, torch.arange(weights_RV.shape[1]))
    order_MV = _ascending(keys_MV).flip(-1)
    # What is reached before a token is at most the limit, or the token is out; the first one is always in.
    is_last_MV = (order_MV >> _ID_BITS).cumsum(-1) > limit_M[:, None]
    last_M1 = (~is_last_MV).sum(-1, keepdim=True).clamp(max=weights_RV.shape[1] - 1)
    rows_kept_MV = torch.where(keys_MV >= order_MV.gather(1, last_M1), weights_MV, 0)
    weights_RV[rows_M] = rows_kept_MV


def _cut_by_top_p(
    weights_RNC: torch.Tensor, rows: SamplingRows, least_weight_R: torch.Tensor, scratch: Scratch
) -> _Cut:
    row_count, count, width = weights_RNC.shape
    is_cut_R = rows.top_p_B < 1
    total_R = weights_RNC.sum((-1, -2))
    limit_R = (rows.top_p_B * total_R).floor()
    low_R, high_R = _bracket(weights_RNC.view(row_count, -1), total_R - limit_R)
    low_R, high_R = torch.where(is_cut_R, low_R, 1.0), torch.where(is_cut_R, high_R, 1.0)
    sums_RN = _sums_from(weights_RNC, high_R, scratch)
    sure_R = sums_RN.sum(-1)
    # `_sums_from` left in the first scratch tensor which tokens are sure.
    is_sure_RNC, is_near_RNC = scratch.like(weights_RNC)
    torch.ge(weights_RNC, low_R[:, None, None], out=is_near_RNC).sub_(is_sure_RNC)
    flat_M = torch.from_numpy(np.flatnonzero(is_near_RNC.to(torch.bool).numpy()))
    row_M, id_M = flat_M // (count * width), flat_M % (count * width)
    weights_M = weights_RNC.view(-1)[flat_M].to(torch.int64)
    keys_M = _keys(weights_M, id_M)
    count_R = torch.bincount(row_M, minlength=row_count)
    keys_RW = torch.zeros(row_count, int(count_R.max()) + 1, dtype=torch.int64)
    keys_RW[row_M, torch.arange(len(row_M)) - (count_R.cumsum(0) - count_R)[row_M]] = keys_M
    order_RW = _ascending(keys_RW).flip(-1)
    is_reached_RW = sure_R[:, None] + (order_RW >> _ID_BITS).cumsum(-1) > limit_R[:, None]
    last_R1 = (~is_reached_RW).sum(-1, keepdim=True).clamp(max=order_RW.shape[1] - 1)
    least_key_R = torch.where(is_cut_R, order_RW.gather(1, last_R1)[:, 0], 0)
    is_proven_R = ~is_cut_R | ((sure_R <= limit_R) & is_reached_RW[:, -1])
    if bool((least_weight_R > 1).any()):
        sums_RN = _sums_from(weights_RNC, torch.maximum(high_R, least_weight_R.to(torch.float64)), scratch)
    is_kept_M = (keys_M >= least_key_R[row_M]) & (weights_M >= least_weight_R[row_M])
    sums_RN.view(-1).index_add_(0, (flat_M // width)[is_kept_M], weights_M[is_kept_M].to(torch.float64))
    return _Cut(sums_RN, least_key_R, is_proven_R)


def _bracket(weights_RV: torch.Tensor, rest_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Guess two weights for each row, such that the first token of the order that is out lies between them.

    The guess is made from the light end, whose sum hardly depends on which tokens fall into the sample, however heavy
    the heaviest are.

    Args:
        weights_RV: float64 [R, V], every token's weight.
        rest_R: what the lightest tokens that are out may weigh together, and no more.
    """
    sample_RS = _ascending(weights_RV[:, ::_SAMPLE_STRIDE].contiguous())
    size = sample_RS.shape[1]
    share = weights_RV.shape[1] / size
    out_R1 = (sample_RS.cumsum(-1) * share < rest_R[:, None]).sum(-1, keepdim=True).clamp(max=size - 1)
    squares_R1 = (sample_RS * sample_RS).cumsum(-1).gather(1, out_R1)
    deviation_R1 = squares_R1.sqrt() / sample_RS.gather(1, out_R1).clamp(min=1)
    spread_R1 = (_SAMPLE_DEVIATIONS * (deviation_R1 + 1)).ceil().to(torch.int64)
    low_R1, high_R1 = out_R1 - spread_R1, out_R1 + spread_R1
    low_R = torch.where(low_R1 < 0, 1.0, sample_RS.gather(1, low_R1.clamp(min=0)))[:, 0].clamp(min=1)
    # One more unit, so that the tokens that tie with the cut lie in between whole.
    high_R = torch.where(high_R1 >= size, _ABOVE_ALL, sample_RS.gather(1, high_R1.clamp(max=size - 1)) + 1)[:, 0]
    return low_R, torch.maximum(low_R, high_R)


def _sums_from(weights_RNC: torch.Tensor, least_R: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Return what the tokens of at least that weight weigh in each block; the first scratch tensor marks them by 1."""
    is_kept_RNC, kept_RNC = scratch.like(weights_RNC)
    torch.ge(weights_RNC, least_R[:, None, None].to(torch.float64), out=is_kept_RNC)
    return torch.mul(is_kept_RNC, weights_RNC, out=kept_RNC).sum(-1)


def _keys(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return unique int64 keys whose descending order is (weight descending, id ascending)."""
    return (weights << _ID_BITS) | (_LARGEST_ID - ids)


def _ascending(values: torch.Tensor) -> torch.Tensor:
    """Sort the last dimension; numpy's sort without indices is several times quicker than torch's with them."""
    ordered: NDArray[np.generic] = np.sort(values.numpy(), axis=-1)
    return torch.from_numpy(ordered)
