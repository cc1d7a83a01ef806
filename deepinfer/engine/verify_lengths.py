"""How many drafts each running request verifies in the next step, chosen from chances and costs as they are known now.

Shapes: R running rows, n drafts a request.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.round_lengths import RoundLengths
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
        rounds: how many drafts a round makes; None where it makes all.
        round_drafts: the choice for the round behind the newest decode step that was planned; None for all.
    """

    def __init__(self, costs: StepCosts, chances: Chances, rounds: RoundLengths | None = None) -> None:
        self.costs = costs
        self.rounds = rounds
        self.round_drafts: int | None = None
        self._chances = chances
        self._is_ahead = False
        # Planned ahead, the length of the round whose chances the host has read; behind it comes round_drafts.
        self._read_drafts: int | None = None

    def learn_chances_from(self, chances: Chances) -> None:
        """Choose by these chances from now on: those that the host has read, where asking the device would wait."""
        self._chances = chances
        self._is_ahead = True

    def choose(
        self, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64], most_R: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return how many drafts each row verifies, at most ``most_R``."""
        if not len(rows_R):
            return most_R
        chances_Rn = self._chances(rows_R, epoch_R)
        after_s = self.costs.sampler_s
        if self.rounds is not None and chances_Rn.shape[1]:
            is_trial = self.rounds.is_trial  # the drafts at hand are those of the choice before this one
            self.rounds.observe(chances_Rn)
            if self._is_ahead:
                chances_Rn = self._of_the_round_behind(chances_Rn, self.rounds)
            self._read_drafts, self.round_drafts = self.round_drafts, self.rounds.choose(len(rows_R), self.costs.curve)
            known = self.rounds.after(len(rows_R))
            after_s = after_s if known is None else known[self.round_drafts]
            if is_trial:
                made_R: NDArray[np.int64] = (chances_Rn > 0).sum(axis=1)
                return np.minimum(most_R, made_R)
        return choose_drafts(chances_Rn, self.costs.curve, after_s, most_R).counts_R

    def note_round(self, requests: int, drafts: int | None, after_s: float) -> None:
        """Learn what judging and the round behind a step have taken."""
        if self.rounds is not None:
            drafts = self.rounds.drafts if drafts is None else drafts
            self.rounds.note(requests, drafts, after_s / self.costs.pace)

    def _of_the_round_behind(self, chances_Rn: NDArray[np.float64], rounds: RoundLengths) -> NDArray[np.float64]:
        """Return the chances of drafts that are being made, by those of the round before, maybe a shorter one."""
        drafts = rounds.drafts
        read, made = (drafts if each is None else each for each in (self._read_drafts, self.round_drafts))
        chances_Rn = chances_Rn.copy()
        chances_Rn[:, read:made] = rounds.chances_n[read:made]
        chances_Rn[:, made:] = 0.0
        return chances_Rn
