"""The cut of top-p and min-p in a row of exact weights, without sorting the row.

A sample of the row says between which two weights the cut of top-p must lie. What weighs more is kept, what weighs less
is not, and only the tokens in between are sorted. The sums are of all tokens and exact, so they prove whether the guess
was right; where it was not, the second guess is that it can be any weight.

Legend: V vocabulary, N blocks of a row, C tokens of a block, S tokens of a sample, M tokens near the cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS
from deepinfer_cpu_ref.quick_blocks import LOG_SLACK, PLACE_SLACK

ID_BITS = 31
LARGEST_ID = 2**ID_BITS - 1

_LARGEST_WEIGHT = 2.0**WEIGHT_BITS
_SAMPLE_STRIDE = 31
_SAMPLE_DEVIATIONS = 3.5
_LARGEST_LOGIT = 1e38


class CutSettings(NamedTuple):
    """What of a row's settings, and which facts of its logits, decide its cut."""

    largest: float
    temperature: float
    top_p: float
    least_weight: int


class Bracket(NamedTuple):
    """A guess: tokens that weigh at least ``high`` are kept by top-p, tokens that weigh less than ``low`` are not."""

    low: float
    high: float


Guess = Callable[[NDArray[np.float64], float], Bracket]


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of a row.

    Attributes:
        sums_N: float64 [N], the kept weight of each block.
        least_key: tokens with a lower key (`keys`) are out.
    """

    sums_N: torch.Tensor
    least_key: int


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


def cut_row(
    weights_NC: torch.Tensor,
    logits_NC: torch.Tensor,
    settings: CutSettings,
    guess: Guess,
    flags_2V: NDArray[np.bool_],
) -> Cut | None:
    """Return what top-p and min-p keep of a row, or None when the guess was wrong.

    Args:
        weights_NC: float64, whole numbers, ids in order; overwritten.
        logits_NC: float32, what they were made of.
        settings: those of the row.
        guess: gets the weights, and what all that are out weigh less than; no result but None depends on it.
        flags_2V: two rows of room, overwritten.
    """
    total = float(weights_NC.sum()) if settings.top_p < 1 else 0.0
    limit = math.floor(settings.top_p * total)
    if limit >= total:  # the product may round up to the whole
        return Cut(_sums_from(weights_NC, settings.least_weight), 0)
    weights_V, logits_V = weights_NC.view(-1).numpy(), logits_NC.reshape(-1).numpy()
    bracket = guess(weights_V, total - limit)
    ids_M = np.flatnonzero(_is_near(logits_V, bracket, settings, flags_2V))
    weights_M = weights_V[ids_M].astype(np.int64)
    is_near_M = (weights_M >= bracket.low) & (weights_M < bracket.high)
    ids_M, weights_M = ids_M[is_near_M], weights_M[is_near_M]

    sums_N = _sums_from(weights_NC, bracket.high)
    sure = float(sums_N.sum())
    keys_M = (weights_M << ID_BITS) | (LARGEST_ID - ids_M)
    order_M = np.sort(keys_M)[::-1]
    last = int(np.searchsorted(sure + np.cumsum(order_M >> ID_BITS), limit, side="right"))
    if sure > limit or last == len(order_M):
        return None
    least_key = int(order_M[last])
    if settings.least_weight > bracket.high:
        sums_N = _sums_from(weights_NC, settings.least_weight)
    is_kept_M = (keys_M >= least_key) & (weights_M >= settings.least_weight)
    places_M = torch.from_numpy(ids_M[is_kept_M] // weights_NC.shape[1])
    sums_N.index_add_(0, places_M, torch.from_numpy(weights_M[is_kept_M]).to(torch.float64))
    return Cut(sums_N, least_key)


def guess_bracket(weights_V: NDArray[np.float64], rest: float) -> Bracket:
    """Guess between which weights the last token lies that is kept, if all that are out weigh less than ``rest``.

    The guess is made from the light end, whose sum hardly depends on which tokens fall into the sample, however heavy
    the heaviest are.
    """
    sample_S = np.sort(weights_V[::_SAMPLE_STRIDE])
    size = len(sample_S)
    out = int(np.searchsorted(np.cumsum(sample_S), rest * size / len(weights_V)))
    light_S = sample_S[: out + 1]
    deviation = math.sqrt(float(light_S @ light_S)) / max(float(light_S[-1]), 1.0)
    spread = math.ceil(_SAMPLE_DEVIATIONS * (deviation + 1))
    low = max(float(sample_S[out - spread]), 1.0) if out >= spread else 1.0
    # One more unit, so that the tokens that tie with the cut lie in between whole.
    high = float(sample_S[out + spread]) + 1 if out + spread < size else _LARGEST_WEIGHT + 1
    return Bracket(low, max(low, high))


def guess_everything(_weights_V: NDArray[np.float64], _rest: float) -> Bracket:
    """Guess what is always right: every token is sorted."""
    return Bracket(1.0, _LARGEST_WEIGHT + 1)


def _is_near(
    logits_V: NDArray[np.float32], bracket: Bracket, settings: CutSettings, flags_2V: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Mark every token whose weight is in the bracket, and few others: reading logits is half of reading weights."""
    from_V, below_V = flags_2V
    np.greater_equal(logits_V, _logit(bracket.low, settings, -1), out=from_V)
    if bracket.high <= _LARGEST_WEIGHT:
        np.less(logits_V, _logit(bracket.high, settings, 1), out=below_V)
        from_V &= below_V
    return from_V


def _logit(weight: float, settings: CutSettings, side: int) -> np.float32:
    """Return a logit that is certainly below (-1) or above (1) every logit of that weight, and hardly farther."""
    scaled = settings.temperature * (math.log(weight / _LARGEST_WEIGHT) + side * LOG_SLACK)
    exact = settings.largest + scaled + side * PLACE_SLACK * (abs(settings.largest) + abs(scaled))
    end = np.float32(side * math.inf)
    return end if abs(exact) > _LARGEST_LOGIT else np.nextafter(np.float32(exact), end)


def _sums_from(weights_NC: torch.Tensor, least: float) -> torch.Tensor:
    """Return what tokens of at least that weight weigh in each block; the others are set to 0."""
    if least > 1:
        torch.nn.functional.threshold(weights_NC, least - 1, 0.0, inplace=True)
    return weights_NC.sum(-1)
