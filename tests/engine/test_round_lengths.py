"""How many drafts a round makes: never a number that is estimated to be worse than another, and learnt from steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from deepinfer.accelerator.ops.drafting import PLACEHOLDER, DraftDistributions
from deepinfer.engine.draft_tally import DraftTally
from deepinfer.engine.round_lengths import (
    LEAST_TIMES,
    MOST_TRIES,
    SETTLING_STEPS,
    STEPS_PER_PROBE,
    STEPS_PER_TRY,
    RoundLengths,
)
from deepinfer.engine.speculation import Round
from deepinfer.engine.step_costs import StepCosts
from deepinfer.engine.verify_lengths import VerifyLengths
from deepinfer.sampling.verify_budget import CostCurve, choose_drafts, rank_rounds

FREE = CostCurve((1, 64), (1.0, 1.0), is_padded=False)
DEAR = CostCurve((1, 64), (1.0, 64.0), is_padded=False)
DRAFTS = 5
TRIED = (0, 1, 3)
"""Beside all of them: none, and what fills up two and four rows."""


def rate(drafts: int, chances_n: np.ndarray, requests: int, curve: CostCurve, after_s: Sequence[float]) -> float:
    tokens = requests * (1 + chances_n[:drafts].sum())
    return tokens / (curve.of(requests * (1 + drafts)) + after_s[drafts])


@pytest.mark.parametrize("seed", range(200))
def test_no_fixed_number_of_drafts_is_estimated_to_be_better(seed: int) -> None:
    draw = np.random.default_rng(seed)
    chances_n = np.cumprod(draw.random(DRAFTS))
    requests = int(draw.integers(1, 33))
    curve = CostCurve((1, 8, 64, 200), tuple(np.cumsum(draw.random(4) + 0.01).tolist()), is_padded=bool(seed % 2))
    after_s = np.cumsum(draw.random(DRAFTS + 1)).tolist()
    chosen, *others = rank_rounds(chances_n, requests, curve, after_s)
    rates = [rate(drafts, chances_n, requests, curve, after_s) for drafts in range(DRAFTS + 1)]
    assert [rates[drafts] for drafts in (chosen, *others)] == sorted(rates, reverse=True)
    # What is then left out of the round makes it no worse.
    made_Rn = np.tile(np.where(np.arange(DRAFTS) < chosen, chances_n, 0.0), (requests, 1))
    budget = choose_drafts(made_Rn, curve, after_s[chosen], np.full(requests, chosen))
    assert budget.tokens_per_s >= max(rates) * (1 - 1e-12)


def test_of_equal_rounds_the_shortest_is_made() -> None:
    assert rank_rounds(np.zeros(3), 4, FREE, [1.0] * 4) == [0, 1, 2, 3]


def lived(rounds: RoundLengths, steps: int, curve: CostCurve, after_s: Sequence[float], requests: int = 4) -> list[int]:
    chosen = []
    for _ in range(steps):
        chosen.append(rounds.choose(requests, curve))
        rounds.note(requests, chosen[-1], after_s[chosen[-1]])
    return chosen


def hopeful(chance: float) -> RoundLengths:
    rounds = RoundLengths(DRAFTS, DraftTally(DRAFTS))
    for _ in range(100):
        rounds.observe(np.tile(chance ** np.arange(1, DRAFTS + 1), (4, 1)))
    return rounds


@pytest.mark.parametrize(
    ("chance", "curve", "after_s", "best"),
    [
        (0.75, FREE, [1.0] * 6, 5),
        (0.75, DEAR, [1.0] * 6, 0),
        (0.75, FREE, [0.1, 0.2, 0.9, 1.6, 2.3, 3.0], 1),
        (0.05, FREE, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 0),
    ],
)
def test_rounds_settle_on_the_best_length(chance: float, curve: CostCurve, after_s: list[float], best: int) -> None:
    chosen = lived(hopeful(chance), 120, curve, after_s)
    assert chosen[:SETTLING_STEPS] == [DRAFTS] * SETTLING_STEPS
    known = SETTLING_STEPS + 2 * len(TRIED) * LEAST_TIMES
    assert chosen[SETTLING_STEPS:known:2] == [drafts for drafts in TRIED for _ in range(LEAST_TIMES)]
    assert chosen[SETTLING_STEPS + 1 : known - 1 : 2] == [DRAFTS] * (len(TRIED) * LEAST_TIMES - 1)
    assert sum(drafts != best for drafts in chosen[known:]) <= 120 // STEPS_PER_PROBE


def test_probes_look_at_the_second_best_and_at_each_length_by_turns() -> None:
    after_s = [0.1, 0.2, 0.9, 1.6, 2.3, 3.0]
    rounds = hopeful(0.75)
    chosen = lived(rounds, 20 * STEPS_PER_PROBE, FREE, after_s)
    rates = [rate(drafts, rounds.chances_n, 4, FREE, after_s) for drafts in range(DRAFTS + 1)]
    second = sorted(range(DRAFTS + 1), key=lambda drafts: -rates[drafts])[1]
    probes = chosen[STEPS_PER_PROBE - 1 :: STEPS_PER_PROBE]
    assert probes[2::2] == [second] * 9
    assert set(probes[1::2]) == {*TRIED, DRAFTS, second}


def test_a_round_that_is_made_to_learn_its_cost_says_so() -> None:
    rounds = hopeful(0.75)
    trials = []
    for _ in range(2 * STEPS_PER_PROBE):
        rounds.note(4, rounds.choose(4, FREE), 1.0)
        trials.append(rounds.is_trial)
    last = SETTLING_STEPS + 2 * len(TRIED) * LEAST_TIMES
    assert [step for step, is_trial in enumerate(trials) if is_trial] == [
        *range(SETTLING_STEPS - LEAST_TIMES, SETTLING_STEPS),
        *range(SETTLING_STEPS, last, 2),
        STEPS_PER_PROBE - 1,
        2 * STEPS_PER_PROBE - 1,
    ]


def test_all_drafts_of_a_trial_are_verified_however_dear_their_rows_seem() -> None:
    rows_R, most_R = np.arange(2), np.array([DRAFTS, 2])
    rounds = hopeful(0.75)
    chances_Rn = np.tile(np.array([0.5, 0.4, 0.3, 0.0, 0.0]), (2, 1))
    lengths = VerifyLengths(StepCosts(DEAR), lambda rows_R, epoch_R: chances_Rn, rounds)
    lived(rounds, 100, DEAR, [1.0] * 6, requests=2)
    assert not rounds.is_trial
    assert lengths.choose(rows_R, rows_R, most_R).tolist() == [0, 0]
    rounds.is_trial = True
    assert lengths.choose(rows_R, rows_R, most_R).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("most", "tried"),
    [(1, {0, 1}), (3, {0, 1, 3}), (4, {0, 1, 3, 4}), (8, {0, 1, 3, 7, 8}), (32, {0, 1, 3, 7, 15, 31, 32})],
)
def test_what_fills_up_a_power_of_two_rows_is_tried(most: int, tried: set[int]) -> None:
    rounds = RoundLengths(most, DraftTally(most))
    assert set(lived(rounds, SETTLING_STEPS + 2 * len(tried) * LEAST_TIMES, FREE, [1.0] * (most + 1))) == tried


def test_a_length_that_is_cheaper_than_what_lies_beside_it_is_found() -> None:
    """Four rows cost what two cost, and six cost far more: no line between one and five shows it."""
    curve = CostCurve((1, 2, 4, 6), (1.0, 1.5, 1.5, 8.0), is_padded=True)
    after_s = [0.1, 1.0, 3.0, 1.1, 6.0, 6.1]
    assert lived(hopeful(0.75), 120, curve, after_s, requests=1)[-1] == 3


def test_a_device_that_becomes_another_one_is_noticed_by_probes() -> None:
    rounds = hopeful(0.75)
    assert lived(rounds, 60, FREE, [1.0] * 6)[-1] == DRAFTS
    later = lived(rounds, 12 * STEPS_PER_PROBE, FREE, [0.1, 5.0, 10.0, 15.0, 20.0, 25.0])
    assert later.count(0) > len(later) // 2
    assert later[-1] == 0


def test_a_slow_spell_is_forgotten_at_every_length() -> None:
    rounds = hopeful(0.75)
    usual_s = [90.0, 100.0, 127.0, 154.0, 181.0, 208.0]
    assert lived(rounds, 200, FREE, usual_s)[-1] == 2
    assert lived(rounds, 10, FREE, [10 * each for each in usual_s])[-1] != 2
    assert lived(rounds, 80 * STEPS_PER_PROBE, FREE, usual_s)[-1] == 2
    assert rounds.after(4) == usual_s


def test_a_device_that_tells_no_times_makes_full_rounds() -> None:
    rounds = RoundLengths(DRAFTS, DraftTally(DRAFTS))
    chosen = [rounds.choose(4, FREE) for _ in range(100)]
    assert sum(drafts != DRAFTS for drafts in chosen) <= len(TRIED) * MOST_TRIES
    assert set(chosen[-25:]) == {DRAFTS}


def test_a_size_goes_by_the_nearest_known_one_until_it_is_known_itself() -> None:
    rounds = hopeful(0.75)
    dear_s, cheap_s = [0.1, 5.0, 10.0, 15.0, 20.0, 25.0], [1.0] * 6
    lived(rounds, 60, FREE, dear_s, requests=1)
    assert rounds.after(8) == rounds.after(1) == dear_s
    chosen = lived(rounds, 120, FREE, cheap_s, requests=8)
    assert chosen[: STEPS_PER_TRY - 1] == [0] * (STEPS_PER_TRY - 1)
    assert chosen[-1] == DRAFTS
    assert rounds.after(8) == cheap_s
    assert rounds.after(1) == dear_s
    assert rounds.after(4) == cheap_s  # of two the nearer one


def test_a_size_that_tells_no_times_goes_by_another_for_ever() -> None:
    rounds = hopeful(0.75)
    lived(rounds, 60, FREE, [0.1, 5.0, 10.0, 15.0, 20.0, 25.0], requests=1)
    chosen = [rounds.choose(2, FREE) for _ in range(400)]
    assert sum(drafts != 0 for drafts in chosen) <= 400 // STEPS_PER_TRY


def test_chances_are_put_right_by_what_became_of_drafts() -> None:
    tally = DraftTally(2)
    rounds = RoundLengths(2, tally)
    for _ in range(100):
        rounds.observe(np.array([[0.8, 0.4], [0.0, 0.0]]))  # the second has no drafts
    assert rounds.chances_n == pytest.approx([0.8, 0.4], abs=1e-3)
    for _ in range(200):
        tally.note(np.array([2]), np.array([0]), np.array([[0.8, 0.4]]))
    assert rounds.chances_n.max() < 0.06


def test_the_first_chances_are_believed_at_once() -> None:
    rounds = RoundLengths(1, DraftTally(1))
    for chance in (0.2, 0.4):
        rounds.observe(np.array([[chance]]))
    assert rounds.chances_n == pytest.approx([0.3])


def test_places_that_no_round_made_keep_what_was_known_of_them() -> None:
    rounds = hopeful(0.5)
    before = rounds.chances_n[2]
    for _ in range(50):
        rounds.observe(np.array([[0.9, 0.0, 0.0, 0.0, 0.0]]))
    assert rounds.chances_n[0] == pytest.approx(0.9, abs=0.01)
    assert rounds.chances_n[2] == before


def test_a_step_planned_ahead_counts_with_the_round_that_is_being_made() -> None:
    """The host has read the chances of the round before, which may have been shorter, or longer."""
    rows_R, most_R = np.arange(2), np.full(2, DRAFTS)
    read_Rn = np.zeros((2, DRAFTS))
    lengths = VerifyLengths(StepCosts(FREE), lambda rows_R, epoch_R: read_Rn, hopeful(0.75))
    lengths.learn_chances_from(lambda rows_R, epoch_R: read_Rn)
    lengths._read_drafts, lengths.round_drafts = 5, 0
    read_Rn[:] = 0.5
    assert lengths.choose(rows_R, rows_R, most_R).tolist() == [0, 0]
    read_Rn[:] = 0.0
    lengths._read_drafts, lengths.round_drafts = 0, 3
    assert lengths.choose(rows_R, rows_R, most_R).tolist() == [3, 3]


def test_rounds_are_timed_at_the_pace_of_the_cost_curve() -> None:
    costs, rounds = StepCosts(FREE), RoundLengths(DRAFTS, DraftTally(DRAFTS))
    lengths = VerifyLengths(costs, lambda rows_R, epoch_R: np.zeros((2, DRAFTS)), rounds)
    costs.pace = 2.0
    for drafts in (*TRIED, DRAFTS):
        for _ in range(LEAST_TIMES):
            lengths.note_round(4, drafts, 3.0)
    assert rounds.after(4) == [1.5] * (DRAFTS + 1)


def test_a_short_round_leaves_placeholders() -> None:
    ids_RnK = torch.arange(12).view(1, 3, 4)
    kept = DraftDistributions(ids_RnK, ids_RnK + 1, torch.ones(1, 3, dtype=torch.int64))
    made = Round(torch.tensor([[7, 8, 9]]), torch.tensor([[0.9, 0.8, 0.7]]), kept).padded(2, 5)
    assert made.token_ids_Rn.tolist() == [[7, 8, *[PLACEHOLDER] * 3]]
    assert made.chances_Rn.tolist() == [[*torch.tensor([0.9, 0.8]).tolist(), 0, 0, 0]]
    assert made.distributions is not None
    assert made.distributions.ids_RnK[0, 2:].unique().tolist() == [-1]
    assert made.distributions.sums_Rn.tolist() == [[1, 1, 0, 0, 0]]
    assert made.distributions.weights_RnK.shape == (1, 5, 4)
