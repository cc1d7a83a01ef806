"""Where the cut of top-p may be in rows of masses, guessed from a sample of each row.

Nothing here need be right: `deepinfer_cpu_ref.quick_cut` proves where a cut is, and a wrong guess leaves a row
undecided.

Legend: R rows, B all rows, V vocabulary, N blocks of a row, C tokens of a block, S tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS
from deepinfer_cpu_ref.quick_masses import Accuracy, Floats, Integers

_ABOVE_ALL = 2.0**WEIGHT_BITS + 1
_SAMPLE_BLOCK_STRIDE = 4
_SAMPLE_TOKENS = 8
_SAMPLE_DEVIATIONS = 3.5
_SAMPLE_SLOPE = 1.1


class CutSettings(NamedTuple):
    """What of the rows' settings, and which facts of their logits, decide their cuts."""

    largest_R: Floats
    temperature_R: Floats
    top_p_R: Floats
    least_weight_R: Integers

    def select(self, part: slice) -> CutSettings:
        """Return those of some rows."""
        return CutSettings(
            self.largest_R[part], self.temperature_R[part], self.top_p_R[part], self.least_weight_R[part]
        )


class Bracket(NamedTuple):
    """Guesses: tokens of at least ``high`` are kept by top-p, tokens of less than ``low`` are not (weights, [R])."""

    low_R: Floats
    high_R: Floats


class Guess(Protocol):
    """Where the cuts of rows may be. Whether they are there is proved; a wrong guess costs time alone."""

    @property
    def middle(self) -> Floats:
        """Weights near those of the cuts, or above them."""

    def bracket(self, excess_R: Floats) -> Bracket:
        """Say between which weights cuts lie, if tokens of at least ``middle`` miss the limits by ``excess_R``."""


@dataclass(frozen=True, slots=True)
class CutRows:
    """Rows that are to be cut.

    Attributes:
        masses_RNC: float32 or float64, ids in order; overwritten.
        logits_BV: float32, what the masses were made of, among others.
        places_R: where.
        total_R: the weight of all tokens.
        settings: those of the rows.
        accuracy: how weights follow from masses.
        add_up: returns the weights of blocks (float64 [R, N]) as the masses are then.
    """

    masses_RNC: torch.Tensor
    logits_BV: NDArray[np.float32]
    places_R: Integers
    total_R: Floats
    settings: CutSettings
    accuracy: Accuracy
    add_up: Callable[[], Floats]

    def sums_from(self, least_R: Floats) -> Floats:
        """Set all masses of less than that weight to 0, and return what the others weigh in each block."""
        least_masses = ((least_R - 1) / self.accuracy.unit_R).tolist()
        for masses_NC, least_mass in zip(self.masses_RNC, least_masses, strict=True):
            if least_mass > 0:
                torch.nn.functional.threshold(masses_NC, least_mass, 0.0, inplace=True)
        return self.add_up()


Guesser = Callable[[CutRows, Floats], Guess]


@dataclass(frozen=True, slots=True)
class SampledGuess:
    """Guesses from samples of the rows' weights, in ascending order.

    Made from the light end, whose sum hardly depends on which tokens fall into the sample, however heavy the heaviest
    are.

    Attributes:
        sample_RS: the weights.
        stride: how many tokens one of the sample stands for.
        middle: float64 [R]; see :class:`Guess`.
    """

    sample_RS: Floats
    stride: float
    middle: Floats

    @classmethod
    def of(cls, rows: CutRows, rest_R: Floats) -> SampledGuess:
        """Guess the weights of the last tokens that are kept, if all that are out weigh less than ``rest_R``."""
        # Neighbours, because reading one token costs as much as reading a line of the cache.
        sample_RS = rows.masses_RNC[:, ::_SAMPLE_BLOCK_STRIDE, :_SAMPLE_TOKENS].flatten(1).numpy()
        sample_RS = np.sort(sample_RS, axis=-1).astype(np.float64) * rows.accuracy.unit_R[:, None]
        stride = rows.masses_RNC[0].numel() / sample_RS.shape[1]
        reached_R = (np.cumsum(sample_RS, axis=-1) < (rest_R / stride)[:, None]).sum(-1)
        return cls(sample_RS, stride, np.maximum(_at(sample_RS, reached_R), 1.0))

    def bracket(self, excess_R: Floats) -> Bracket:
        """See :class:`Guess`."""
        size = self.sample_RS.shape[1]
        tokens_R = np.abs(excess_R) / (self.middle * self.stride)
        steps_R = np.ceil(_SAMPLE_SLOPE * tokens_R + _SAMPLE_DEVIATIONS * (np.sqrt(tokens_R) + 1))
        is_far_R = tokens_R > size
        steps_R = np.minimum(steps_R, size).astype(np.int64)
        below_R = (self.sample_RS < self.middle[:, None]).sum(-1) - steps_R
        above_R = (self.sample_RS <= self.middle[:, None]).sum(-1) + steps_R
        low_R = np.where((below_R >= 0) & ~is_far_R, np.maximum(_at(self.sample_RS, below_R), 1.0), 1.0)
        # One more unit, so that the tokens that tie with the cut lie in between whole.
        high_R = np.where((above_R < size) & ~is_far_R, _at(self.sample_RS, above_R) + 1, _ABOVE_ALL)
        is_below_R = excess_R >= 0
        low_R = np.where(is_below_R | is_far_R, low_R, self.middle)
        high_R = np.where(is_below_R & ~is_far_R, self.middle, high_R)
        return Bracket(low_R, high_R)


@dataclass(frozen=True, slots=True)
class Everything:
    """The guess that is always right: every token is sorted."""

    middle: Floats

    def bracket(self, excess_R: Floats) -> Bracket:
        """See :class:`Guess`."""
        return Bracket(np.ones_like(excess_R), np.full_like(excess_R, _ABOVE_ALL))


def guess_everything(_rows: CutRows, rest_R: Floats) -> Guess:
    """Guess that the cuts can be any weights."""
    return Everything(np.full_like(rest_R, _ABOVE_ALL))


def _at(sample_RS: Floats, place_R: Integers) -> Floats:
    inside_R = np.clip(place_R, 0, sample_RS.shape[1] - 1)
    found: Floats = np.take_along_axis(sample_RS, inside_R[:, None], axis=1)[:, 0]
    return found
