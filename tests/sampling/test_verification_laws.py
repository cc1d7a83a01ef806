"""What verification emits has the target's own law; every wrong rule that was tried is shown to be told apart.

A Markov chain over five tokens: target and draft have a table each. 200,000 trials draft, verify and, where a step gave
too few tokens, go on with another step; the joint law of the first tokens is compared with the product of the tables.
Seeds are fixed, so nothing here is random from run to run.

Legend: R trials, n drafts, V vocabulary, L tokens that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.drafting import DraftDistributions, DraftRuns, Verdicts
from deepinfer.accelerator.ops.sampling import RowFacts, SamplingRows
from deepinfer.sampling.drafting import DraftDraws, DraftPolicy
from deepinfer.sampling.streams import DrawCase, Keying
from deepinfer_cpu_ref import Driver

TRIALS = 200_000
FEW = 30_000
"""Enough to tell wrong rules apart."""
LOOKED_AT = 2
FIRST_INDEX = 7
GROUPS = Driver().op_groups(OpOptions())
SAMPLING, DRAFTING = GROUPS["sampling"], GROUPS["drafting"]

STANDARD = DraftPolicy(capacity=5)

TARGET_VV = torch.tensor(
    [
        [1.2, 0.1, -0.8, 0.9, 0.3],
        [-0.5, 1.4, 0.2, 0.0, 0.7],
        [0.4, -1.2, 0.6, 1.0, -0.1],
        [0.9, 0.8, 0.1, -0.6, 0.2],
        [0.0, 0.5, 1.1, 0.3, -0.9],
    ]
)
DRAFT_VV = TARGET_VV.flip(1) * 0.7 + torch.tensor([0.5, -0.3, 0.2, 0.0, 0.4])


@dataclass(frozen=True)
class Setting:
    """How tokens are chosen, and how many are drafted."""

    drafts: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def settings(setting: Setting, count: int, streams_B: Tensor, seeds_B: Tensor) -> SamplingRows:
    return SamplingRows(
        temperature_B=torch.full((count,), setting.temperature, dtype=torch.float64),
        top_k_B=torch.full((count,), setting.top_k),
        top_p_B=torch.full((count,), setting.top_p, dtype=torch.float64),
        min_weight_B=torch.zeros(count, dtype=torch.int64),
        seeds_B=seeds_B,
        streams_B=streams_B,
        forced_ids_B=torch.full((count,), -1),
        facts=RowFacts(
            has_greedy=False,
            has_top_k=setting.top_k > 0,
            has_top_p=setting.top_p < 1,
            has_min_p=False,
            has_forced=False,
            largest_top_k=setting.top_k,
        ),
    )


Tamper = Callable[["Step"], "Step"]


@dataclass(frozen=True)
class Step:
    """One verifying step of all trials, as it is given to the op."""

    logits_BV: Tensor
    rows: SamplingRows
    runs: DraftRuns
    distributions: DraftDistributions
    resample_streams_B: Tensor
    accept_streams_B: Tensor


def emitted(
    setting: Setting, tamper: Tamper | None = None, policy: DraftPolicy | None = None, trials: int = TRIALS
) -> Tensor:
    """Return the first tokens [R, L] that each trial emits."""
    policy = policy or STANDARD
    seeds_R = torch.arange(trials)
    newest_R, made_R = torch.zeros_like(seeds_R), torch.zeros_like(seeds_R)
    tokens_RL = torch.full((trials, LOOKED_AT), -1)
    for _ in range(LOOKED_AT):
        step = prepared(setting, newest_R, made_R, seeds_R, policy)
        step = tamper(step) if tamper is not None else step
        verdicts: Verdicts
        if policy.verification == "coupled":
            verdicts = DRAFTING.match(SAMPLING.sample(step.logits_BV, step.rows), step.runs)
        else:
            verdicts = DRAFTING.verify(
                step.logits_BV,
                step.rows,
                step.runs,
                step.distributions,
                step.resample_streams_B,
                step.accept_streams_B,
            )
        for place in range(setting.drafts + 1):
            token_R = verdicts.token_ids_Rm[:, place]
            takes_R = (token_R >= 0) & (made_R < LOOKED_AT)
            tokens_RL[takes_R, made_R[takes_R]] = token_R[takes_R]
            newest_R = torch.where(takes_R, token_R, newest_R)
            made_R = made_R + takes_R
    assert int(made_R.min()) == LOOKED_AT
    return tokens_RL


def prepared(setting: Setting, newest_R: Tensor, made_R: Tensor, seeds_R: Tensor, policy: DraftPolicy) -> Step:
    trials, drafts, keying = len(seeds_R), setting.drafts, int(policy.keying)
    streams_R = (FIRST_INDEX + made_R) * keying
    draws = DraftDraws(DRAFTING, policy, settings(setting, trials, streams_R, seeds_R))
    before_R, chosen = newest_R, []
    for draft in range(drafts):
        before_R = draws(draft, DRAFT_VV[before_R])
        chosen.append(before_R)
    token_ids_Rn = torch.stack(chosen, 1)
    logits_BV = TARGET_VV[torch.cat((newest_R[:, None], token_ids_Rn), 1)].flatten(0, 1)
    row_step = 10_000_019 if policy.keying is Keying.ORIGINAL else 1
    streams_B = (streams_R[:, None] + torch.arange(drafts + 1) * keying * row_step).flatten()
    rows = settings(setting, len(logits_BV), streams_B, seeds_R.repeat_interleave(drafts + 1))
    first_R = torch.arange(trials) * (drafts + 1)
    none_RnK = torch.zeros(trials, drafts, 0, dtype=torch.int64)
    return Step(
        logits_BV,
        rows,
        DraftRuns(first_R, torch.full((trials,), drafts), token_ids_Rn),
        draws.distributions() or DraftDistributions(none_RnK, none_RnK, none_RnK.sum(-1)),
        streams_B + int(DrawCase.RESAMPLE),
        streams_B + int(DrawCase.ACCEPT),
    )


def law(setting: Setting) -> Tensor:
    """Return the joint law [V, V] of the first two tokens by the textbook: softmax, nucleus, product."""
    rows = []
    for logits_V in TARGET_VV.double():
        p_V = (logits_V / setting.temperature).softmax(-1)
        order = sorted(range(len(p_V)), key=lambda token: (-float(p_V[token]), token))
        order = order[: setting.top_k] if setting.top_k else order
        whole = sum(float(p_V[token]) for token in order)
        kept, mass = [], 0.0
        for token in order:
            kept.append(token)
            mass += float(p_V[token])
            if mass > setting.top_p * whole:
                break
        left_V = torch.zeros_like(p_V)
        left_V[kept] = p_V[kept]
        rows.append(left_V / left_V.sum())
    table_VV = torch.stack(rows)
    return table_VV[0][:, None] * table_VV


def excess(tokens_RL: Tensor, expected_VV: Tensor) -> float:
    """Pearson's statistic, divided by its 99.99 % point (Wilson and Hilferty): above 1 means rejected."""
    width = len(expected_VV)
    observed = torch.bincount(tokens_RL[:, 0] * width + tokens_RL[:, 1], minlength=width * width).double()
    expected = expected_VV.flatten() * len(tokens_RL)
    if bool((observed[expected == 0] > 0).any()):
        return math.inf
    present = expected > 0
    statistic = float(((observed - expected)[present] ** 2 / expected[present]).sum())
    freedom = int(present.sum()) - 1
    spread = 2 / (9 * freedom)
    return statistic / (freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3)


SETTINGS = [
    Setting(1, temperature=0.5),
    Setting(3, temperature=2.0),
    Setting(2, top_p=0.8),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_joint_law_is_that_of_a_run_without_drafts(setting: Setting) -> None:
    assert excess(emitted(setting), law(setting)) < 1


def test_the_originals_keying_keeps_the_law_too() -> None:
    assert (
        excess(emitted(Setting(2), policy=DraftPolicy(capacity=5, keying=Keying.ORIGINAL), trials=FEW), law(Setting(2)))
        < 1
    )


def test_a_draft_that_is_drawn_from_fewer_tokens_keeps_the_law() -> None:
    """The pool's capacity cuts the draft's distribution, never the target's."""
    assert excess(emitted(Setting(2), policy=DraftPolicy(capacity=2), trials=FEW), law(Setting(2))) < 1


def every_draft_is_certain(step: Step) -> Step:
    """A point mass on each draft: accepted as often as the target likes it, and rejected to everything else."""
    drafts_Rn1 = step.runs.token_ids_Rn[:, :, None]
    ones_Rn1 = torch.full_like(drafts_Rn1, 2**31)
    return replace(step, distributions=DraftDistributions(drafts_Rn1, ones_Rn1, ones_Rn1[:, :, 0]))


def test_a_draft_that_nothing_was_drawn_for_keeps_the_law_as_a_point_mass() -> None:
    assert excess(emitted(Setting(2), every_draft_is_certain, trials=FEW), law(Setting(2))) < 1


@pytest.mark.parametrize("setting", [Setting(2, top_p=0.8)], ids=str)
def test_coupled_verification_has_the_law_and_the_very_tokens_of_the_run_without_drafts(setting: Setting) -> None:
    coupled = emitted(setting, policy=DraftPolicy(verification="coupled"))
    assert excess(coupled, law(setting)) < 1
    assert torch.equal(coupled, plain(setting))


def plain(setting: Setting) -> Tensor:
    """Return the first tokens of each trial without any draft."""
    newest_R, made = torch.zeros(TRIALS, dtype=torch.int64), []
    for place in range(LOOKED_AT):
        streams_R = torch.full((TRIALS,), (FIRST_INDEX + place) * 4)
        rows = settings(setting, TRIALS, streams_R, torch.arange(TRIALS))
        newest_R = SAMPLING.sample(TARGET_VV[newest_R], rows).token_ids_B
        made.append(newest_R)
    return torch.stack(made, 1)


# --- negative controls -------------------------------------------------------------------------------------------


def drawn_at_another_temperature(step: Step) -> Step:
    """The draft ignored the temperature, but its distribution is said to have followed it."""
    squared = step.distributions.weights_RnK.double() ** 2
    weights_RnK = (squared / squared.sum(-1, keepdim=True) * 2**31).long()
    return replace(
        step, distributions=replace(step.distributions, weights_RnK=weights_RnK, sums_Rn=weights_RnK.sum(-1))
    )


def greedy_draft(step: Step) -> Step:
    """The draft is the best token, judged as if it had been drawn."""
    ids_RnK, weights_RnK = step.distributions.ids_RnK, step.distributions.weights_RnK
    best_Rn = ids_RnK.gather(2, weights_RnK.argmax(-1, keepdim=True))[:, :, 0]
    logits_BV = step.logits_BV.clone()
    for place in range(best_Rn.shape[1]):
        logits_BV[step.runs.first_row_R + place + 1] = TARGET_VV[best_Rn[:, place]]
    return replace(step, runs=replace(step.runs, token_ids_Rn=best_Rn), logits_BV=logits_BV)


def one_stream_for_coin_and_resample(step: Step) -> Step:
    return replace(step, resample_streams_B=step.accept_streams_B)


def one_stream_for_draft_and_coin(step: Step) -> Step:
    return replace(step, accept_streams_B=step.rows.streams_B + int(DrawCase.DRAFT))


def distribution_of_the_place_before(step: Step) -> Step:
    parts = step.distributions
    rolled = DraftDistributions(*(each.roll(1, 1) for each in (parts.ids_RnK, parts.weights_RnK, parts.sums_Rn)))
    return replace(step, distributions=rolled)


def rows_of_the_next_trial(step: Step) -> Step:
    return replace(step, runs=replace(step.runs, first_row_R=step.runs.first_row_R.roll(1)))


@pytest.mark.parametrize(
    "tamper",
    [
        drawn_at_another_temperature,
        greedy_draft,
        one_stream_for_coin_and_resample,
        one_stream_for_draft_and_coin,
        distribution_of_the_place_before,
        rows_of_the_next_trial,
    ],
)
def test_a_wrong_rule_is_told_apart(tamper: Tamper) -> None:
    setting = Setting(2)
    assert excess(emitted(setting, tamper, trials=FEW), law(setting)) > 1.5


def test_a_plain_draw_after_a_rejection_is_told_apart() -> None:
    """Accept as the rule says, but draw from the target's own distribution where it says the residual."""
    setting = Setting(1)
    seeds_R, zeros_R = torch.arange(TRIALS), torch.zeros(TRIALS, dtype=torch.int64)
    step = prepared(setting, zeros_R, zeros_R, seeds_R, STANDARD)
    verdicts = DRAFTING.verify(
        step.logits_BV, step.rows, step.runs, step.distributions, step.resample_streams_B, step.accept_streams_B
    )
    resampled = SAMPLING.sample(step.logits_BV, replace(step.rows, streams_B=step.resample_streams_B)).token_ids_B
    first_R = torch.where(verdicts.accepted_R > 0, verdicts.token_ids_Rm[:, 0], resampled[::2])
    expected_V = law(setting).sum(1)
    wrong_R2 = torch.stack((torch.zeros_like(first_R), first_R), 1)
    right_R2 = torch.stack((torch.zeros_like(first_R), verdicts.token_ids_Rm[:, 0]), 1)
    padded_VV = torch.zeros(5, 5, dtype=torch.float64)
    padded_VV[0] = expected_V
    assert excess(right_R2, padded_VV) < 1
    assert excess(wrong_R2, padded_VV) > 1.5


def test_acceptance_is_one_minus_the_distance_of_the_distributions() -> None:
    setting = Setting(1)
    seeds_R, zeros_R = torch.arange(TRIALS), torch.zeros(TRIALS, dtype=torch.int64)
    step = prepared(setting, zeros_R, zeros_R, seeds_R, STANDARD)
    verdicts = DRAFTING.verify(
        step.logits_BV, step.rows, step.runs, step.distributions, step.resample_streams_B, step.accept_streams_B
    )
    expected = float(torch.minimum(TARGET_VV[0].double().softmax(-1), DRAFT_VV[0].double().softmax(-1)).sum())
    share = float(verdicts.accepted_R.double().mean())
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / TRIALS)


def test_coin_and_resample_are_uncorrelated() -> None:
    seeds_R = torch.arange(TRIALS)
    index_R = torch.full((TRIALS,), 4 * FIRST_INDEX)
    uniforms = torch.stack([SAMPLING.uniforms(seeds_R, index_R + case) for case in range(4)])
    correlation = torch.corrcoef(uniforms).fill_diagonal_(0)
    assert float(correlation.abs().max()) < 4 / math.sqrt(TRIALS)
