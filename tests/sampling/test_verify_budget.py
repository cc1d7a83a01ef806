"""The budget of variable verification: its published vectors, every other choice, and the device's own ranking."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import ArgumentError
from deepinfer.sampling.verify_budget import CostCurve, choose_drafts, rank_drafts

W, X, Y, Z = (0.95, 0.90, 0.80), (0.85, 0.60, 0.30), (0.50, 0.20, 0.10), (0.30, 0.10, 0.05)


def milliseconds(costs: dict[int, float], **options: bool) -> CostCurve:
    return CostCurve(tuple(costs), tuple(cost / 1e3 for cost in costs.values()), **options)


def test_the_published_example_verifies_four_drafts() -> None:
    budget = choose_drafts(np.array([W, X, Y, Z]), milliseconds({4: 8.1, 8: 8.6, 16: 12.0}), 0.4e-3)
    assert budget.counts_R.tolist() == [3, 1, 0, 0]
    assert budget.rows == 8
    assert budget.tokens_per_s == pytest.approx(7.5 / 9.0e-3)


def test_with_a_cheaper_large_graph_it_verifies_all_of_them() -> None:
    budget = choose_drafts(np.array([W, X, Y, Z]), milliseconds({4: 8.1, 8: 8.6, 16: 10.4}), 0.4e-3)
    assert budget.counts_R.tolist() == [3, 3, 3, 3]
    assert budget.tokens_per_s / 1e3 == pytest.approx(0.894, abs=5e-4)


def test_a_full_graph_is_filled_before_a_dear_one_is_begun() -> None:
    chances_Rn = np.array([[0.9, 0.8], [0.7, 0.3], [0.6, 0.2]])
    budget = choose_drafts(chances_Rn, milliseconds({4: 7.0, 8: 7.6, 9: 9.5}), 0.4e-3)
    assert (budget.rows, budget.counts_R.tolist()) == (8, [2, 2, 1])


def test_equal_chances_go_to_the_lower_request_and_equal_rates_to_fewer_rows() -> None:
    flat = milliseconds({2: 1.0, 3: 1.0, 4: 9.0})
    assert choose_drafts(np.array([[0.5], [0.5]]), flat).counts_R.tolist() == [1, 0]
    assert choose_drafts(np.zeros((2, 1)), milliseconds({4: 1.0})).counts_R.tolist() == [0, 0]


def test_nothing_is_given_beyond_the_room_of_a_request_or_to_what_is_no_chance() -> None:
    free = milliseconds({1: 1.0, 9: 1.0})
    chances_Rn = np.array([[0.9, 0.8, 0.7], [math.nan, 0.9, 0.9], [0.4, 0.9, 0.1]])
    assert choose_drafts(chances_Rn, free, most_R=np.array([1, 3, 3])).counts_R.tolist() == [1, 0, 3]
    assert choose_drafts(np.zeros((2, 0)), free).counts_R.tolist() == [0, 0]


def test_costs_between_sizes_are_those_of_the_larger_one_or_on_the_line() -> None:
    padded, plain = milliseconds({2: 1.0, 4: 3.0}), milliseconds({2: 1.0, 4: 3.0}, is_padded=False)
    assert [padded.of(rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx([1e-3, 1e-3, 3e-3, 3e-3, 6e-3])
    assert [plain.of(rows) for rows in (1, 2, 3, 4, 8)] == pytest.approx([1e-3, 1e-3, 2e-3, 3e-3, 6e-3])


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1,), (math.nan,))]
)
def test_a_curve_that_cannot_be_is_refused(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="cost curve"):
        CostCurve(sizes, seconds)


chance = st.sampled_from([0.0, 0.05, 0.25, 0.5, 0.5, 0.75, 0.9, 1.0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, CostCurve, float, np.ndarray]:
    requests, drafts = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    chances_Rn = np.array(draw(st.lists(chance, min_size=requests * drafts, max_size=requests * drafts)))
    chances_Rn = np.minimum.accumulate(chances_Rn.reshape(requests, drafts), axis=1)
    sizes = sorted(draw(st.sets(st.integers(1, requests * (drafts + 1)), min_size=1)))
    costs = draw(st.lists(st.integers(1, 40), min_size=len(sizes), max_size=len(sizes)))
    curve = CostCurve(tuple(sizes), tuple(cost / 8 for cost in costs), is_padded=draw(st.booleans()))
    most_R = np.array(draw(st.lists(st.integers(0, drafts), min_size=requests, max_size=requests)))
    return chances_Rn, curve, draw(st.integers(0, 8)) / 8, most_R


@given(problems())
@settings(deadline=None)
def test_no_other_choice_of_lengths_is_estimated_to_be_better(problem) -> None:
    """Fixed lengths are among the others; each is computed in the plainest way."""
    chances_Rn, curve, sampler_s, most_R = problem
    best = choose_drafts(chances_Rn, curve, sampler_s, most_R)
    rates = []
    for counts in product(*(range(most + 1) for most in most_R.tolist())):
        tokens = len(counts) + sum(chances_Rn[nth, :count].sum() for nth, count in enumerate(counts))
        rates.append(tokens / (curve.of(len(counts) + sum(counts)) + sampler_s))
    assert best.tokens_per_s == pytest.approx(max(rates))
    assert (best.counts_R <= most_R).all()
    own = sum(chances_Rn[nth, :count].sum() for nth, count in enumerate(best.counts_R.tolist()))
    assert best.expected_tokens == pytest.approx(len(most_R) + own)


@given(problems())
@settings(deadline=None)
def test_the_device_hands_the_hosts_total_out_as_the_host_would(problem) -> None:
    chances_Rn, curve, sampler_s, most_R = problem
    best = choose_drafts(chances_Rn, curve, sampler_s, most_R)
    total = int(best.counts_R.sum())
    ranked_R = rank_drafts(torch.from_numpy(chances_Rn), total, torch.from_numpy(most_R))
    assert ranked_R.tolist() == best.counts_R.tolist()
    assert rank_drafts(torch.from_numpy(chances_Rn), torch.tensor(total), torch.from_numpy(most_R)).equal(ranked_R)


def test_the_device_ranks_by_the_newest_chances_and_keeps_the_total() -> None:
    newest_Rn = torch.tensor([[0.2, 0.1, 0.1], [0.9, 0.8, 0.7], [math.nan, 0.9, 0.9]])
    assert rank_drafts(newest_Rn, 4).tolist() == [1, 3, 0]
    assert rank_drafts(newest_Rn, 9).tolist() == [3, 3, 3]
    assert rank_drafts(newest_Rn, 9, torch.tensor([1, 2, 0])).tolist() == [1, 2, 0]
    assert rank_drafts(newest_Rn, 0).tolist() == [0, 0, 0]
    assert rank_drafts(torch.zeros(2, 0), 0).tolist() == [0, 0]


def test_the_ranking_reads_nothing_on_the_host() -> None:
    """On meta tensors there is no value to read."""
    counts_R = rank_drafts(torch.zeros(4, 3, device="meta"), torch.zeros((), dtype=torch.int64, device="meta"))
    assert (counts_R.shape, counts_R.device.type) == ((4,), "meta")
