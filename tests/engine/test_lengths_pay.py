"""Variable verification against every fixed length, on machines of which all is known but that are not steady.

The policy is the real one; only the machine is made up. What the policy sees are times of single steps, which swing by
an eighth on a machine that drifts by a seventh, and a curve that was measured wrongly by a tenth at each size. It is
judged by what its choices cost without any of that, as a share of what the best fixed length would make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pytest
from numpy.typing import NDArray

from deepinfer.engine.draft_tally import DraftTally
from deepinfer.engine.round_lengths import RoundLengths
from deepinfer.engine.step_costs import StepCosts
from deepinfer.engine.verify_lengths import VerifyLengths
from deepinfer.sampling.verify_budget import CostCurve

DRAFTS, CHANCE = 5, 0.75
TRUE_n = CHANCE ** np.arange(1, DRAFTS + 1)
LEARNING, STEPS, LIVES = 100, 500, 6


@dataclass(frozen=True)
class Machine:
    """Seconds of a step by its rows, and of judging with a round of so many drafts."""

    requests: int
    step_s: Callable[[int], float]
    round_s: Callable[[int], float]
    best: int

    def fixed(self, drafts: int) -> float:
        tokens = self.requests * (1 + TRUE_n[:drafts].sum())
        return float(tokens / (self.step_s(self.requests * (1 + drafts)) + self.round_s(drafts)))


MACHINES = {
    "a row costs the more the fewer there are": Machine(
        1, lambda rows: 60 + 27 * min(rows, 2) + 8 * max(rows - 2, 0), lambda n: 4 + (n > 0) * (40 + 8 * n), best=5
    ),
    "beyond four rows another kernel": Machine(
        1,
        lambda rows: (90, 130, 150, 150)[rows - 1] if rows <= 4 else 220 + 4 * rows,
        lambda n: 4 + (n > 0) * (40 + 8 * n),
        best=3,
    ),
    "rows cost next to nothing": Machine(8, lambda rows: 100 + 0.2 * rows, lambda n: 4 + 2 * n, best=5),
    "every row costs the same": Machine(
        32, lambda rows: 150 + 10 * rows, lambda n: 20 + (n > 0) * (150 + 70 * n), best=0
    ),
}


def share_of_the_best(machine: Machine, seed: int, *, wrong: float = 0.1, jumps: float = 0.0) -> float:
    """Live a policy; the curve of the start is ``wrong``, and the pace is another one with this chance a step."""
    draw = np.random.default_rng(seed)
    requests, most = machine.requests, machine.requests * (1 + DRAFTS)
    sizes = (*(size for size in (*range(1, 9), 12, 16, 24, 32, 48, 64, 96, 128) if size < most), most)
    measured = np.maximum.accumulate([machine.step_s(size) * (1 + wrong * draw.standard_normal()) for size in sizes])
    costs, tally = StepCosts(CostCurve(sizes, tuple(measured.tolist()), is_padded=False)), DraftTally(DRAFTS)
    made, pace = DRAFTS, 0.0

    def chances(rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.tile(np.where(np.arange(DRAFTS) < made, TRUE_n, 0.0), (requests, 1))

    lengths = VerifyLengths(costs, chances, RoundLengths(DRAFTS, tally))
    everyone_R, all_R = np.arange(requests), np.full(requests, DRAFTS)
    tokens = seconds = 0.0
    for step in range(LEARNING + STEPS):
        counts_R = np.minimum(lengths.choose(everyone_R, everyone_R, all_R), made)
        assert lengths.round_drafts is not None
        known_Rn = chances(everyone_R, everyone_R)
        made, rows = lengths.round_drafts, requests + int(counts_R.sum())
        step_s, round_s = machine.step_s(rows), machine.round_s(made)
        if step >= LEARNING:
            tokens += requests + sum(float(TRUE_n[:count].sum()) for count in counts_R)
            seconds += step_s + round_s
        is_right_Rn = (draw.random((requests, DRAFTS)) < CHANCE).cumprod(1)
        is_verified_Rn = np.arange(DRAFTS) < counts_R[:, None]
        tally.note(counts_R, (is_right_Rn * is_verified_Rn).sum(1), np.where(is_verified_Rn, known_Rn, 0.0))
        pace = 0.98 * pace + 0.03 * draw.standard_normal()
        if draw.random() < jumps:
            pace = 0.3 * draw.standard_normal()
        swing = np.exp(pace + 0.12 * draw.standard_normal(2))
        costs.note(rows, step_s * swing[0], round_s * swing[1])
        lengths.note_round(requests, made, round_s * swing[1])
    return tokens / seconds / max(machine.fixed(drafts) for drafts in range(DRAFTS + 1))


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_it_makes_hardly_less_than_the_best_fixed_length(machine: Machine) -> None:
    rates = [machine.fixed(drafts) for drafts in range(DRAFTS + 1)]
    assert rates.index(max(rates)) == machine.best
    shares = [share_of_the_best(machine, seed) for seed in range(LIVES)]
    assert fmean(shares) > 0.97
    assert min(shares) > 0.93


def test_a_machine_whose_pace_jumps_does_not_mislead_it() -> None:
    machine = MACHINES["every row costs the same"]
    shares = [share_of_the_best(machine, seed, wrong=0.2, jumps=0.03) for seed in range(LIVES)]
    assert fmean(shares) > 0.97
    assert min(shares) > 0.95
