"""Drafting ops: what they have in common with sampling, and the corners of verification."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.drafting import DraftDistributions, DraftRuns
from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer.errors import OpRefusedError
from deepinfer_cpu_ref import Driver

GROUPS = Driver().op_groups(OpOptions())
SAMPLING, DRAFTING = GROUPS["sampling"], GROUPS["drafting"]


def rows_of(count: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingRows:
    return SamplingRows(
        temperature_B=torch.full((count,), temperature, dtype=torch.float64),
        top_k_B=torch.full((count,), top_k),
        top_p_B=torch.full((count,), top_p, dtype=torch.float64),
        min_weight_B=torch.zeros(count, dtype=torch.int64),
        seeds_B=torch.arange(count) * 7 + 3,
        streams_B=torch.arange(count) * 4,
        forced_ids_B=torch.full((count,), -1),
    )


def logits_of(count: int, width: int = 50) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)) * 2


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 4}], ids=str)
def test_a_guess_without_reach_is_the_plain_draw(settings: dict[str, float]) -> None:
    logits_BV, rows = logits_of(300), rows_of(300, **settings)  # type: ignore[arg-type]
    guessed = DRAFTING.guess(logits_BV, rows, 0.0)
    assert torch.equal(guessed.token_ids_B, SAMPLING.sample(logits_BV, rows).token_ids_B)


def test_a_wide_reach_prefers_likely_tokens_and_never_one_without_mass() -> None:
    logits_BV, rows = logits_of(400), rows_of(400, top_k=5)
    weights = SAMPLING.weigh(logits_BV, rows).weights_BV
    masses = []
    for reach in (0.0, 0.2, 1.0):
        tokens_B1 = DRAFTING.guess(logits_BV, rows, reach).token_ids_B[:, None]
        chosen_B1 = weights.gather(1, tokens_B1)
        assert bool((chosen_B1 > 0).all())
        masses.append(float(chosen_B1.double().mean()))
    assert masses == sorted(masses)


@pytest.mark.parametrize("capacity", [1, 3, 50, 64])
def test_a_proposal_keeps_what_it_was_drawn_from(capacity: int) -> None:
    logits_BV, rows = logits_of(200), rows_of(200)
    found = DRAFTING.propose(logits_BV, rows, capacity)
    assert found.ids_BK.shape == found.weights_BK.shape == (200, capacity)
    limited = SAMPLING.weigh(logits_BV, rows_of(200, top_k=capacity))
    spread_BV = torch.zeros(200, 51, dtype=torch.int64).scatter_(1, found.ids_BK % 51, found.weights_BK)[:, :50]
    assert torch.equal(spread_BV, limited.weights_BV)
    assert torch.equal(found.sums_B, limited.sums_B)
    drawn_B = SAMPLING.draw(limited, SAMPLING.uniforms(rows.seeds_B, rows.streams_B))
    assert torch.equal(found.token_ids_B, drawn_B)
    kept = found.ids_BK >= 0
    ascending = (found.ids_BK.diff(dim=1) > 0) | ~kept[:, 1:]
    assert bool(ascending.all())


def verified(logits_BV: Tensor, rows: SamplingRows, tokens_Rn: Tensor, weights_RnV: Tensor) -> Tensor:
    drafts = tokens_Rn.shape[1]
    requests = len(tokens_Rn)
    runs = DraftRuns(torch.arange(requests) * (drafts + 1), torch.full((requests,), drafts), tokens_Rn)
    ids_RnV = torch.arange(weights_RnV.shape[2]).expand(weights_RnV.shape)
    kept = DraftDistributions(ids_RnV, weights_RnV, weights_RnV.sum(-1))
    return DRAFTING.verify(logits_BV, rows, runs, kept, rows.streams_B + 1, rows.streams_B + 2).token_ids_Rm


def test_where_flooring_leaves_nothing_the_lowest_of_the_best_is_emitted() -> None:
    """130,000 equal tokens but for two: each draft takes all but less than a unit from every token of the target."""
    width = 130_000
    logits_BV = torch.zeros(2, width)
    logits_BV[:, 777] = logits_BV[:, 99] = 1e-6
    even_RnV = torch.full((1, 1, width), 2**31 - 3000)
    # A forced acceptance coin cannot be asked for: the drafted token has no mass in the target instead.
    logits_BV[0, 5] = -torch.inf
    assert verified(logits_BV, rows_of(2), torch.tensor([[5]]), even_RnV)[0].tolist() == [99, -1]


def test_a_draft_without_mass_in_the_target_is_never_accepted() -> None:
    count = 500
    logits_BV = logits_of(2 * count, 8)
    logits_BV[::2, 3] = -torch.inf
    weights_RnV = torch.full((count, 1, 8), 2**20)
    tokens_Rm = verified(logits_BV, rows_of(2 * count), torch.full((count, 1), 3), weights_RnV)
    assert bool((tokens_Rm[:, 0] != 3).all())
    assert bool((tokens_Rm[:, 1] == -1).all())


def test_a_draft_of_the_targets_own_distribution_is_always_accepted() -> None:
    count = 500
    logits_BV, rows = logits_of(2 * count, 8), rows_of(2 * count)
    weights = SAMPLING.weigh(logits_BV, rows).weights_BV[::2, None]
    tokens_Rm = verified(logits_BV, rows, torch.arange(count)[:, None] % 8, weights)
    assert torch.equal(tokens_Rm[:, 0], torch.arange(count) % 8)
    assert bool((tokens_Rm[:, 1] >= 0).all())


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(OpRefusedError, match="capacity is 0"):
        DRAFTING.propose(logits_of(1), rows_of(1), 0)
    with pytest.raises(OpRefusedError, match=r"reach is 1\.5"):
        DRAFTING.guess(logits_of(1), rows_of(1), 1.5)
