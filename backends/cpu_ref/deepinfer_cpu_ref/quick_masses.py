"""Sums of the weights of rows of which nearly every token matters: exact ones, and quicker ones with a proven error.

A mass is a token's weight in another unit. In float64 masses are the weights themselves, whole numbers below 2**53
whose sums are exact in any order. In float32 they are powers of two of scaled logits, and each is off from its token's
weight by at most ``relative`` times itself and ``absolute`` besides:

* A scaled logit ``e`` is ``(x - shift) * scale``. The rounded factor, the product and, with a shift, the difference put
  ``e`` off by ``|e| * off / ln 2``. For ``e`` above 0 that changes the power by up to ``e * off`` of itself, and ``e``
  is at most ``top``, that of the largest logit. For ``e`` below 0 it is the power times ``|e|`` that counts, and
  ``2**e * |e|`` is never above 0.531. Below -126 both powers are nothing beside that.
* `torch.exp2` is off by at most one unit in the last place, two roundings. Each fold of a block rounds once more.
* A weight is the floor of its share of 2**31 units: less than one unit below it. What float64 rounds, here and in the
  definition, is below ``SUM_ROUNDING`` of the whole.

Bounds carry `_ROOM` more than that, which is more than their own roundings and all products of two errors.

Legend: R rows of a group, N blocks of a row, C tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS
from deepinfer_cpu_ref.quick_blocks import BlockedRows, DrawnRows
from deepinfer_cpu_ref.quick_scratch import Scratch

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_UNIT = 2.0**-WEIGHT_BITS
_FLOAT32_ROUNDING = 2.0**-24
_FLOAT64_ROUNDING = 2.0**-53
_ROOM = 1.01
_LARGEST_UNSHIFTED = 30.0
_SHIFTED = 6.0
_LARGEST_LOGIT = 1e38
_WIDEST_SCALE = 2.0**40
_MOST_FOLDS = 2
_EXACT_ELEMENTS = 2**19
_APPROXIMATE_ELEMENTS = 2**20
_MOST_ROWS = 512


class Accuracy(NamedTuple):
    """How masses are related to weights, row by row.

    Attributes:
        unit_R: the weight of a mass of 1.
        relative_R: how far a mass may be off, in proportion to itself.
        absolute_R: how far, in weight, it may be off beside that.
        rounding_R: how far any sum may be off beside all that, in proportion to the sum of the row.
    """

    unit_R: Floats
    relative_R: Floats
    absolute_R: Floats
    rounding_R: Floats

    @property
    def is_exact(self) -> bool:
        """Whether masses are weights."""
        return not self.absolute_R.any()

    def select(self, part: slice) -> Accuracy:
        """Return that of some rows."""
        return Accuracy(*(column_R[part] for column_R in self))

    def slack(self, weight_R: Floats) -> Floats:
        """Bound how far a mass of about that weight may be off, and a unit beside that; 0 where masses are exact."""
        return 2 * (self.relative_R * weight_R + self.absolute_R)

    def room_of_cut(self, kept_R: Floats, total_R: Floats, top_p_R: Floats, tokens: int) -> Floats:
        """Bound how far ``kept`` less the floor of ``top_p * total`` may be off.

        What is kept is in both terms, and so is off with the factor 1 - ``top_p``, all else with the factor ``top_p``.
        """
        relative_R = self.relative_R * ((1 - top_p_R) * kept_R + top_p_R * (total_R - kept_R))
        absolute_R = self.absolute_R * (tokens * np.maximum(top_p_R, 1 - top_p_R) + 1)
        room_R: Floats = relative_R + absolute_R + self.rounding_R * total_R
        return room_R

    def room_of_draw(
        self, uniform_R: Floats, before_R: Floats, tokens_before_R: Integers, total_R: Floats, tokens: int
    ) -> Floats:
        """Bound how far ``before`` less the floor of ``uniform * total`` may be off, likewise."""
        off_before_R = self.relative_R * before_R + self.absolute_R * tokens_before_R
        off_behind_R = self.relative_R * total_R + self.absolute_R * tokens - off_before_R
        off_R: Floats = uniform_R * off_behind_R + (1 - uniform_R) * off_before_R
        return off_R + self.absolute_R + self.rounding_R * total_R


class Piece(NamedTuple):
    """Some rows' masses, until the next piece is asked for.

    Attributes:
        part: which rows of the group.
        masses_RNC: float32 or float64, ids in order; may be overwritten.
    """

    part: slice
    masses_RNC: torch.Tensor


class ExactMasses:
    """Weights in float64, bit for bit those of the definition."""

    def __init__(self, blocked: BlockedRows, drawn: DrawnRows) -> None:
        one_R = np.ones(len(drawn.rows_R))
        none_R = np.zeros_like(one_R)
        self.accuracy = Accuracy(one_R, none_R, none_R, none_R)
        self._blocked = blocked
        self._drawn = drawn

    def pieces(self, scratch: Scratch) -> Iterator[Piece]:
        """Yield all rows in order."""
        largest_R, temperature_R = self._blocked.largest_B[self._drawn.rows_R], self._drawn.settings.temperature_B
        is_divided = bool((temperature_R != 1).any())
        for part, logits_RNC in _parts(self._blocked, self._drawn, _EXACT_ELEMENTS):
            weights_RNC = scratch.take("exact masses", tuple(logits_RNC.shape), torch.float64).copy_(logits_RNC)
            weights_RNC.sub_(largest_R[part, None, None])
            if is_divided:
                weights_RNC.div_(temperature_R[part, None, None])
            yield Piece(part, to_weights(weights_RNC))


class ApproximateMasses:
    """Powers of two in float32, which cost a third of weights in float64.

    Args:
        blocked, drawn: rows of which `can_be_approximate` agrees.
    """

    def __init__(self, blocked: BlockedRows, drawn: DrawnRows) -> None:
        largest_R = blocked.largest_B[drawn.rows_R]
        scale_R = _scale(drawn)
        unshifted_R = largest_R * scale_R
        # Without a shift where the logits lie around 0, which saves a reading.
        is_shifted_R = ~((unshifted_R >= 0) & (unshifted_R <= _LARGEST_UNSHIFTED))
        shift_R = torch.where(is_shifted_R, (largest_R - _SHIFTED / scale_R).to(torch.float32).to(torch.float64), 0.0)
        scale32_R = scale_R.to(torch.float32)
        top_R = (largest_R - shift_R) * scale_R
        roundings_R = _FLOAT32_ROUNDING * (1.0 + is_shifted_R.to(torch.float64))
        off_R = (((scale32_R - scale_R) / scale_R).abs() + roundings_R) * (math.log(2.0) * _ROOM)
        unit_R = (WEIGHT_BITS - top_R).exp2()
        self.accuracy = Accuracy(
            unit_R=unit_R.numpy(),
            relative_R=(top_R.clamp(min=0) * off_R + (2 + _MOST_FOLDS) * _FLOAT32_ROUNDING * _ROOM).numpy(),
            absolute_R=(off_R * unit_R * 0.54 + _ROOM).numpy(),
            rounding_R=np.full(len(drawn.rows_R), _sum_rounding(blocked)),
        )
        self._blocked = blocked
        self._drawn = drawn
        self._scale32_R = scale32_R
        self._shift32_R = shift_R.to(torch.float32) if bool(is_shifted_R.any()) else None

    def pieces(self, scratch: Scratch) -> Iterator[Piece]:
        """Yield all rows in order."""
        for part, logits_RNC in _parts(self._blocked, self._drawn, _APPROXIMATE_ELEMENTS):
            masses_RNC = scratch.take("masses", tuple(logits_RNC.shape), torch.float32)
            if self._shift32_R is not None:
                logits_RNC = torch.sub(logits_RNC, self._shift32_R[part, None, None], out=masses_RNC)
            torch.mul(logits_RNC, self._scale32_R[part, None, None], out=masses_RNC)
            yield Piece(part, masses_RNC.exp2_())


Masses = ExactMasses | ApproximateMasses


def can_be_approximate(blocked: BlockedRows, drawn: DrawnRows) -> torch.Tensor:
    """Say of which rows (bool [R]) the largest scaled logit, shifted or not, is in the range of the bounds."""
    scale_R, largest_R = _scale(drawn), blocked.largest_B[drawn.rows_R]
    return (scale_R > 1 / _WIDEST_SCALE) & (scale_R < _WIDEST_SCALE) & (largest_R.abs() < _LARGEST_LOGIT)


def _scale(drawn: DrawnRows) -> torch.Tensor:
    return math.log2(math.e) / drawn.settings.temperature_B


def to_weights(scaled: torch.Tensor) -> torch.Tensor:
    """Turn float64 logits, less the largest and divided by the temperature, into weights, in place."""
    # Dividing by a power of two and dropping the fraction is the floor of the product, in one pass.
    return torch.div(scaled.exp_(), _UNIT, rounding_mode="trunc", out=scaled)


def add_up(masses_RNC: torch.Tensor, unit_R: Floats, sums_RN: torch.Tensor, scratch: Scratch) -> None:
    """Store the weight of each block, from sums in float64."""
    # Widening a mass costs as much as a sum of two, so that halves are laid upon each other first.
    for _ in range(_folds(masses_RNC)):
        width = masses_RNC.shape[2] // 2
        folded_RNC = scratch.take(f"folded {width}", (*masses_RNC.shape[:2], width), torch.float32)
        masses_RNC = torch.add(masses_RNC[:, :, :width], masses_RNC[:, :, width:], out=folded_RNC)
    if masses_RNC.dtype != torch.float64:
        masses_RNC = scratch.take("wide", tuple(masses_RNC.shape), torch.float64).copy_(masses_RNC)
    torch.sum(masses_RNC, -1, out=sums_RN).mul_(torch.from_numpy(unit_R)[:, None])


def _folds(masses_BNC: torch.Tensor) -> int:
    """Return how often blocks are halved in float32 before they are added up in float64."""
    if masses_BNC.dtype == torch.float64:
        return 0
    width, folds = masses_BNC.shape[2], 0
    while width % 2 == 0 and folds < _MOST_FOLDS:
        width, folds = width // 2, folds + 1
    return folds


def _sum_rounding(blocked: BlockedRows) -> float:
    """Bound what float64 rounds: as many sums as there are tokens, twice, and exponents below 2**10."""
    count, width = blocked.logits_BNC.shape[1:]
    return _FLOAT64_ROUNDING * (2 * count * width + 2**14)


def _parts(blocked: BlockedRows, drawn: DrawnRows, elements: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield ranges of the rows, and their logits: a view where they lie side by side, else a copy."""
    count, width = blocked.logits_BNC.shape[1:]
    step = min(max(1, elements // (count * width)), _MOST_ROWS)
    places: list[int] = drawn.rows_R.tolist()
    for start in range(0, len(places), step):
        stop = min(start + step, len(places))
        first, last = places[start], places[stop - 1]
        is_run = last - first == stop - 1 - start  # rows ascend
        part = slice(start, stop)
        yield part, blocked.logits_BNC[first : last + 1] if is_run else blocked.logits_BNC[drawn.rows_R[part]]
