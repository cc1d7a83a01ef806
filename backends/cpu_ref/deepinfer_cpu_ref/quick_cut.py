"""The cut of top-p and min-p in a row of exact weights, without sorting the row.

A sample of the row says near which weight the cut of top-p must lie. The exact sum of all that weigh as much says how
far off that is, and with the sample between which two weights to look. What weighs more is kept, what weighs less is
not, and only the tokens in between are sorted. The sums are of all tokens and exact, so they prove whether the guess
was right; where it was not, the second guess is that it can be any weight.

Legend: V vocabulary, N blocks of a row, C tokens of a block, S tokens of a sample, M tokens near the cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS
from deepinfer_cpu_ref.quick_blocks import LOG_SLACK, PLACE_SLACK

ID_BITS = 31
LARGEST_ID = 2**ID_BITS - 1

_LARGEST_WEIGHT = 2.0**WEIGHT_BITS
_UNIT = 2.0**-WEIGHT_BITS
_SAMPLE_STRIDE = 31
_SAMPLE_DEVIATIONS = 4.5
_SAMPLE_SLOPE = 1.1
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


class Guess(Protocol):
    """Where the cut of a row may be. Whether it is there is proved; a wrong guess costs time alone."""

    @property
    def middle(self) -> float:
        """A weight near that of the cut, or above it."""

    def bracket(self, excess: float) -> Bracket:
        """Say between which weights the cut lies, if tokens of at least ``middle`` miss the limit by ``excess``."""


Guesser = Callable[[NDArray[np.float64], float], Guess]


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
    guesser: Guesser,
    flags_2V: NDArray[np.bool_],
) -> Cut | None:
    """Return what top-p and min-p keep of a row, or None when the guess was wrong.

    Args:
        weights_NC: float64, whole numbers, ids in order; overwritten.
        logits_NC: float32, what they were made of.
        settings: those of the row.
        guesser: gets the weights, and what all that are out weigh less than; no result but None depends on it.
        flags_2V: two rows of room, overwritten.
    """
    total = float(weights_NC.sum()) if settings.top_p < 1 else 0.0
    limit = math.floor(settings.top_p * total)
    if limit >= total:  # the product may round up to the whole
        return Cut(_sums_from(weights_NC, settings.least_weight), 0)
    logits_V = logits_NC.reshape(-1).numpy()
    guess = guesser(weights_NC.view(-1).numpy(), total - limit)
    sums_N = _sums_from(weights_NC, guess.middle)
    bracket = guess.bracket(limit - float(sums_N.sum()))
    ids_M = np.flatnonzero(_is_near(logits_V, bracket, settings, flags_2V))
    weights_M = weights_of(logits_V[ids_M], settings)
    is_near_M = (weights_M >= bracket.low) & (weights_M < bracket.high)
    ids_M, weights_M = ids_M[is_near_M], weights_M[is_near_M]
    # What is in the sums already and may yet go is taken back.
    _add(sums_N, ids_M, np.where(weights_M >= guess.middle, -weights_M, 0), weights_NC.shape[1])
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
    _add(sums_N, ids_M[is_kept_M], weights_M[is_kept_M], weights_NC.shape[1])
    return Cut(sums_N, least_key)


def weights_of(logits_M: NDArray[np.float32], settings: CutSettings) -> NDArray[np.int64]:
    """Return the weights of some logits of a row, bit for bit those of the whole row."""
    scaled_M = torch.from_numpy(logits_M).to(torch.float64).sub_(settings.largest)
    if settings.temperature != 1:
        scaled_M.div_(settings.temperature)
    # Dividing by a power of two and dropping the fraction is the floor of the product, in one pass.
    weights: NDArray[np.int64] = torch.div(scaled_M.exp_(), _UNIT, rounding_mode="trunc").to(torch.int64).numpy()
    return weights


@dataclass(frozen=True, slots=True)
class SampledGuess:
    """A guess from a sample of a row's weights, in ascending order.

    Made from the light end, whose sum hardly depends on which tokens fall into the sample, however heavy the heaviest
    are.
    """

    sample_S: NDArray[np.float64]
    middle: float

    @classmethod
    def of(cls, weights_V: NDArray[np.float64], rest: float) -> SampledGuess:
        """Guess the weight of the last token that is kept, if all that are out weigh less than ``rest``."""
        sample_S = np.sort(weights_V[::_SAMPLE_STRIDE])
        reached = int(np.searchsorted(np.cumsum(sample_S), rest * len(sample_S) / len(weights_V)))
        return cls(sample_S, max(float(sample_S[min(reached, len(sample_S) - 1)]), 1.0))

    def bracket(self, excess: float) -> Bracket:
        """See :class:`Guess`."""
        tokens = abs(excess) / (self.middle * _SAMPLE_STRIDE)
        if tokens > len(self.sample_S):
            return Everything().bracket(excess)
        steps = math.ceil(_SAMPLE_SLOPE * tokens + _SAMPLE_DEVIATIONS * (math.sqrt(tokens) + 1))
        if excess >= 0:
            place = int(np.searchsorted(self.sample_S, self.middle)) - steps
            return Bracket(max(float(self.sample_S[place]), 1.0) if place >= 0 else 1.0, self.middle)
        place = int(np.searchsorted(self.sample_S, self.middle, side="right")) + steps
        # One more unit, so that the tokens that tie with the cut lie in between whole.
        high = float(self.sample_S[place]) + 1 if place < len(self.sample_S) else _LARGEST_WEIGHT + 1
        return Bracket(self.middle, high)


@dataclass(frozen=True, slots=True)
class Everything:
    """The guess that is always right: every token is sorted."""

    middle: float = _LARGEST_WEIGHT + 1

    def bracket(self, excess: float) -> Bracket:  # noqa: ARG002 - the same for any
        """See :class:`Guess`."""
        return Bracket(1.0, _LARGEST_WEIGHT + 1)


def guess_everything(_weights_V: NDArray[np.float64], _rest: float) -> Guess:
    """Guess that the cut can be any weight."""
    return Everything()


def _add(sums_N: torch.Tensor, ids_M: NDArray[np.int64], weights_M: NDArray[np.int64], width: int) -> None:
    sums_N.index_add_(0, torch.from_numpy(ids_M // width), torch.from_numpy(weights_M).to(torch.float64))


def _is_near(
    logits_V: NDArray[np.float32], bracket: Bracket, settings: CutSettings, flags_2V: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Mark every token whose weight is in the bracket, and few others: reading logits is half of reading weights."""
    from_V: NDArray[np.bool_] = flags_2V[0]
    below_V: NDArray[np.bool_] = flags_2V[1]
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
