"""How many drafts each running request verifies in the next step, chosen from chances and costs as they are known now.

Shapes: R running rows, n drafts a request.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.step_costs import StepCosts
from deepinfer.sampling.verify_budget import choose_drafts

Chances = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float64]]
"""Takes rows and their epochs; returns the cumulative chances of their drafts [R, n], 0 where there is none."""


class VerifyLengths:
    """Chooses what makes the most tokens a second.

    A request behind its prompt has drafts already, so it takes part from its first decode step on; one whose drafts
    were lost has chances of 0 and verifies none until the next round.

    Attributes:
        costs: what steps cost.
    """

    def __init__(self, costs: StepCosts, chances: Chances) -> None:
        self.costs = costs
        self._chances = chances

    def learn_chances_from(self, chances: Chances) -> None:
        """Choose by these chances from now on: those that the host has read, where asking the device would wait."""
        self._chances = chances

    def choose(
        self, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64], most_R: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return how many drafts each row verifies, at most ``most_R``."""
        if not len(rows_R):
            return most_R
        chances_Rn = self._chances(rows_R, epoch_R)
        return choose_drafts(chances_Rn, self.costs.curve, self.costs.sampler_s, most_R).counts_R
