"""The cut of top-p and min-p in rows of masses, without sorting the rows.

A sample of a row says near which weight the cut of top-p must lie (`deepinfer_cpu_ref.quick_guess`). The sum of all
that weigh as much says how far off that is, and with the sample between which two weights to look. What weighs more is
kept, what weighs less is not, and only the tokens in between are weighed exactly and sorted.

Why the cut is right: all tokens of at least ``high`` come before all in between, and those come before all others. So
the cut is the token in between with which the running sum passes the limit, if it is not passed before, and is passed
in between. The sums are of all tokens, so they prove that, whatever the guess was. With exact masses they are exact.
With approximate ones the difference of sum and limit is known within a room (`Accuracy.room_of_cut`): every token with
which the sum may pass the limit is found, the tokens between the first and the last of them are the doubt, and a cut
that may lie elsewhere is given up. Whether a token is in the sum is said by its mass, and the masses of tokens in
between are taken out again one by one, so that it need not be the truth about its weight.

Legend: R rows, B all rows, V vocabulary, N blocks of a row, C tokens of a block, M tokens near a cut.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS
from deepinfer_cpu_ref.quick_blocks import LOG_SLACK, PLACE_SLACK
from deepinfer_cpu_ref.quick_guess import Bracket, CutRows, CutSettings, Guesser
from deepinfer_cpu_ref.quick_masses import Accuracy, Floats, Integers, to_weights

UNDECIDED = -2
"""Stands for the key or the token of a row that a quick way could not decide."""
ID_BITS = 31
LARGEST_ID = 2**ID_BITS - 1

_LARGEST_WEIGHT = 2**WEIGHT_BITS
_LARGEST_LOGIT = 1e38
_LARGEST_TEMPERATURE = 1e300  # above it logits would do the same, and their bounds overflow
# A key among many rows: the row, how much lighter than the heaviest, the id, which is below 2**21.
_ROW_SHIFT = 53
_WEIGHT_SHIFT = 21


class Cuts(NamedTuple):
    """What is kept of rows.

    Attributes:
        sums_RN: the kept weight of each block.
        least_key_R: tokens with a lower key (`keys`) are out, as far as is known; `UNDECIDED` where nothing is.
        doubt_R: the weight of tokens below that may yet be in, and how far sums are off beside their accuracy.
    """

    sums_RN: Floats
    least_key_R: Integers
    doubt_R: Floats


def keep_by_top_p(weights_RV: torch.Tensor, top_p_R: torch.Tensor) -> None:
    """Set to 0, in place, what top-p removes from integer weights (int64 [R, V]), by sorting whole rows."""
    rows_M = (top_p_R < 1).nonzero()[:, 0]
    if len(rows_M) == 0:
        return
    weights_MV = weights_RV[rows_M]
    limit_M1 = (top_p_R[rows_M] * weights_MV.sum(-1)).floor()[:, None]
    keys_MV = keys(weights_MV, torch.arange(weights_RV.shape[1]))
    # Without indices numpy sorts several times quicker than torch, and the keys hold the ids.
    order_MV = torch.from_numpy(np.sort(keys_MV.numpy(), axis=-1)).flip(-1)
    last_M1 = torch.searchsorted((order_MV >> ID_BITS).cumsum(-1).to(torch.float64), limit_M1, right=True)
    least_M1 = order_MV.gather(1, last_M1.clamp(max=weights_RV.shape[1] - 1))
    weights_RV[rows_M] = torch.where(keys_MV >= least_M1, weights_MV, 0)


def keys(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return unique int64 keys whose descending order is (weight descending, id ascending)."""
    return weights.bitwise_left_shift(ID_BITS).bitwise_or(LARGEST_ID - ids)


def cut_rows(rows: CutRows, guesser: Guesser, flags_2RV: NDArray[np.bool_]) -> Cuts:
    """Return what top-p and min-p keep of some rows.

    Args:
        rows: the rows.
        guesser: gets the rows, and what all that are out weigh less than; a wrong guess only leaves rows undecided.
        flags_2RV: room, overwritten.
    """
    settings, accuracy, total_R = rows.settings, rows.accuracy, rows.total_R
    count, width = rows.masses_RNC.shape[1:]
    limit_R = np.floor(settings.top_p_R * total_R)
    # The product may round up to the whole. Then there is no cut but that of min-p.
    is_cut_R = (settings.top_p_R < 1) & (limit_R < total_R)
    guess = guesser(rows, total_R - limit_R)
    sums_RN = rows.sums_from(np.where(is_cut_R, guess.middle, settings.least_weight_R))
    bracket = _widened(guess.bracket(limit_R - sums_RN.sum(-1)), accuracy)
    near = _find_near(rows, bracket, is_cut_R, flags_2RV)

    place_M = near.row_M * (count * width) + near.ids_M
    taken_M = rows.masses_RNC.view(-1).numpy().take(place_M) * accuracy.unit_R[near.row_M]
    sums_RN -= _by_block(near, taken_M, width, sums_RN)
    # Not taken back is what they did to the rounding of sums.
    doubt_R = accuracy.relative_R * np.bincount(near.row_M, taken_M, len(total_R))
    sure_R = sums_RN.sum(-1)
    room_R = doubt_R + accuracy.room_of_cut(sure_R, total_R, settings.top_p_R, count * width)

    count_R = np.bincount(near.row_M, minlength=len(total_R))
    begin_R = np.cumsum(count_R) - count_R
    # One more at the end, for rows with none.
    before_M = np.append(np.cumsum(near.weights_M) - near.weights_M, 0)
    through_M = (sure_R - before_M[begin_R])[near.row_M] + before_M[:-1] + near.weights_M
    last_R = _count_below(near, through_M, limit_R - room_R)
    last_perhaps_R = _count_below(near, through_M, limit_R + room_R)
    is_known_R = is_cut_R & (sure_R + room_R <= limit_R) & (last_perhaps_R < count_R)

    least_key_R = np.where((settings.top_p_R < 1) & (is_cut_R | (not accuracy.is_exact)), UNDECIDED, 0)
    found_R = np.flatnonzero(is_known_R)
    cut_R, perhaps_R = (begin_R + last_R)[found_R], (begin_R + last_perhaps_R)[found_R]
    least_key_R[found_R] = (near.weights_M[cut_R] << ID_BITS) | (LARGEST_ID - near.ids_M[cut_R])
    doubt_R[found_R] += through_M[perhaps_R] - through_M[cut_R]
    is_heavy_R = is_known_R & (settings.least_weight_R > bracket.high_R)
    if is_heavy_R.any():
        heavy_RN = rows.sums_from(np.where(is_heavy_R, settings.least_weight_R, 0))
        sums_RN = np.where(is_heavy_R[:, None], heavy_RN, sums_RN)
    is_kept_M = np.arange(len(near.row_M)) - begin_R[near.row_M] <= last_R[near.row_M]
    is_kept_M &= near.weights_M >= settings.least_weight_R[near.row_M]
    sums_RN += _by_block(near, near.weights_M * is_kept_M, width, sums_RN)
    return Cuts(sums_RN, least_key_R, doubt_R)


class _Near(NamedTuple):
    """Tokens near the cuts of their rows: by row, and in it by weight descending and id ascending."""

    row_M: Integers
    ids_M: Integers
    weights_M: Integers


def _widened(bracket: Bracket, accuracy: Accuracy) -> Bracket:
    """Take in every token of which mass and weight may not say the same about the ends."""
    low_R = np.maximum(bracket.low_R - accuracy.slack(bracket.low_R), 1.0)
    return Bracket(low_R, bracket.high_R + accuracy.slack(np.minimum(bracket.high_R, _LARGEST_WEIGHT)))


def _find_near(rows: CutRows, bracket: Bracket, is_cut_R: NDArray[np.bool_], flags_2RV: NDArray[np.bool_]) -> _Near:
    """Return every token whose weight is in the bracket of its row."""
    from_RV, below_RV = flags_2RV
    # Few others are so by their logits, which are there already.
    low_R, high_R = _logits(bracket.low_R, rows.settings, -1), _logits(bracket.high_R, rows.settings, 1)
    for row, place in enumerate(rows.places_R.tolist()):
        if not is_cut_R[row]:
            from_RV[row] = False
            continue
        np.greater_equal(rows.logits_BV[place], low_R[row], out=from_RV[row])
        if bracket.high_R[row] <= _LARGEST_WEIGHT:
            np.less(rows.logits_BV[place], high_R[row], out=below_RV[row])
            from_RV[row] &= below_RV[row]
    places_M = np.flatnonzero(from_RV)
    row_M = places_M // from_RV.shape[1]
    ids_M = places_M - row_M * from_RV.shape[1]
    weights_M = _weights_of(rows, row_M, ids_M)
    is_near_M = (weights_M >= bracket.low_R[row_M]) & (weights_M < bracket.high_R[row_M])
    row_M, ids_M, weights_M = row_M[is_near_M], ids_M[is_near_M], weights_M[is_near_M]
    order_M = np.sort((row_M << _ROW_SHIFT) | ((_LARGEST_WEIGHT - weights_M) << _WEIGHT_SHIFT) | ids_M)
    lighter_M = (order_M >> _WEIGHT_SHIFT) & (2 ** (_ROW_SHIFT - _WEIGHT_SHIFT) - 1)
    return _Near(row_M, order_M & (2**_WEIGHT_SHIFT - 1), _LARGEST_WEIGHT - lighter_M)


def _weights_of(rows: CutRows, row_M: Integers, ids_M: Integers) -> Integers:
    """Return the weights of some tokens, bit for bit those of the whole rows."""
    scaled_M = torch.from_numpy(rows.logits_BV[rows.places_R[row_M], ids_M]).to(torch.float64)
    scaled_M.sub_(torch.from_numpy(rows.settings.largest_R[row_M]))
    scaled_M.div_(torch.from_numpy(rows.settings.temperature_R[row_M]))
    weights: Integers = to_weights(scaled_M).to(torch.int64).numpy()
    return weights


def _by_block(near: _Near, weights_M: Floats | Integers, width: int, like_RN: Floats) -> Floats:
    places_M = near.row_M * like_RN.shape[1] + near.ids_M // width
    sums: Floats = np.bincount(places_M, weights_M, like_RN.size).astype(np.float64, copy=False)
    return sums.reshape(like_RN.shape)


def _count_below(near: _Near, through_M: Floats, limit_R: Floats) -> Integers:
    return np.bincount(near.row_M, through_M <= limit_R[near.row_M], len(limit_R)).astype(np.int64)


def _logits(weight_R: Floats, settings: CutSettings, side: int) -> NDArray[np.float32]:
    """Return logits that are certainly below (-1) or above (1) every logit of those weights, and hardly farther."""
    temperature_R = np.minimum(settings.temperature_R, _LARGEST_TEMPERATURE)
    scaled_R = temperature_R * (np.log(weight_R / _LARGEST_WEIGHT) + side * LOG_SLACK)
    exact_R = settings.largest_R + scaled_R + side * PLACE_SLACK * (np.abs(settings.largest_R) + np.abs(scaled_R))
    end = np.float32(side * math.inf)
    inside_R = np.clip(exact_R, -_LARGEST_LOGIT, _LARGEST_LOGIT).astype(np.float32)
    return np.where(np.abs(exact_R) > _LARGEST_LOGIT, end, np.nextafter(inside_R, end))
