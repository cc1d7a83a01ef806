"""What became of drafts, place by place, beside what the draft model expected.

Shapes: R requests, n drafts a request, B ranges of chances.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PRIOR = 12.0
"""So many drafts that came true as expected are assumed beforehand."""

CHANCE_RANGES = 10
"""Equal ranges of chances for which expected and real acceptance are counted apart."""


class ChanceRange(NamedTuple):
    """Verified drafts whose chances lay in one range.

    Attributes:
        verified: how many.
        expected: the sum of their chances.
        accepted: how many were accepted.
    """

    verified: int
    expected: float
    accepted: int


class DraftTally:
    """Counts over the life of an engine; place j counts only together with all places before it.

    Attributes:
        verified_n: how often a draft of each place was verified.
        accepted_n: how often it was accepted.
    """

    def __init__(self, drafts: int) -> None:
        self.verified_n = np.zeros(drafts, np.int64)
        self.accepted_n = np.zeros(drafts, np.int64)
        self._expected_n = np.zeros(drafts)
        self._ranges_B3 = np.zeros((CHANCE_RANGES, len(ChanceRange._fields)))

    def note(
        self, verified_R: NDArray[np.integer], accepted_R: NDArray[np.integer], chances_Rn: NDArray[np.floating]
    ) -> None:
        """Count a step.

        Args:
            verified_R: drafts that each request verified.
            accepted_R: how many of them were accepted.
            chances_Rn: cumulative chances of all drafts; what is no number counts as 0.
        """
        chances_Rn = np.nan_to_num(chances_Rn, nan=0.0).clip(0.0, 1.0)
        places_n = np.arange(len(self.verified_n))
        is_verified_Rn = places_n < verified_R[:, None]
        is_accepted_Rn = is_verified_Rn & (places_n < accepted_R[:, None])
        self.verified_n += is_verified_Rn.sum(0)
        self.accepted_n += is_accepted_Rn.sum(0)
        self._expected_n += np.where(is_verified_Rn, chances_Rn, 0.0).sum(0)
        chances = chances_Rn[is_verified_Rn]
        counted = np.stack((np.ones_like(chances), chances, is_accepted_Rn[is_verified_Rn]), -1)
        ranges = np.clip((chances * CHANCE_RANGES).astype(np.int64), 0, CHANCE_RANGES - 1)
        np.add.at(self._ranges_B3, ranges, counted)

    @property
    def chance_ranges(self) -> tuple[ChanceRange, ...]:
        """Verified drafts by the range of their chance, [0, 0.1) first and [0.9, 1] last."""
        return tuple(ChanceRange(int(row[0]), float(row[1]), int(row[2])) for row in self._ranges_B3)

    @property
    def corrections_n(self) -> NDArray[np.float64]:
        """By what factor the chances of each place come true; few drafts say little, so that it begins at 1."""
        corrections_n: NDArray[np.float64] = (self.accepted_n + _PRIOR) / (self._expected_n + _PRIOR)
        return corrections_n

    @property
    def confidence_error(self) -> float:
        """How far expected and real acceptance lie apart: over all places, as a share of the verified drafts."""
        verified = int(self.verified_n.sum())
        return float(np.abs(self._expected_n - self.accepted_n).sum() / verified) if verified else 0.0
