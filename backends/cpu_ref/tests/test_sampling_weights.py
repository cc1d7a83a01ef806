"""Integer weights, filters and draws of the reference against the definition written out token by token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from deepinfer.accelerator.ops.sampling import RowFacts, RowStatus, SamplingRows, TokenWeights
from deepinfer.numerics import uniform_53
from deepinfer_cpu_ref.sampling import CpuRefSampling

OPS = CpuRefSampling()
UNIT = 2**31
INF = math.inf
NAN = math.nan


def rows(
    temperature: Sequence[float],
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
    facts: RowFacts | None = None,
) -> SamplingRows:
    count = len(temperature)
    return SamplingRows(
        temperature_B=torch.tensor(temperature, dtype=torch.float64),
        top_k_B=torch.tensor(top_k, dtype=torch.int64),
        top_p_B=torch.tensor(top_p, dtype=torch.float64),
        min_weight_B=torch.tensor([int(p * UNIT) for p in min_p], dtype=torch.int64),
        seeds_B=torch.arange(count) + 5,
        streams_B=torch.arange(count) * 4,
        forced_ids_B=torch.full((count,), -1),
        facts=facts if facts is not None else RowFacts(),
    )


def same(count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingRows:
    return rows([temperature] * count, [top_k] * count, [top_p] * count, [min_p] * count)


def expected_weights(x: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The definition, in Python integers; only the exponential itself is the tensor library's."""
    largest = max(x)
    if temperature == 0:
        weights = [0] * len(x)
        weights[list(x).index(largest)] = UNIT
    else:
        scaled = torch.tensor([(value - largest) / temperature for value in x], dtype=torch.float64)
        weights = [math.floor(value * UNIT) for value in scaled.exp().tolist()]
    order = sorted(range(len(x)), key=lambda i: (-weights[i], i))
    if 1 <= top_k < len(x):
        order = order[:top_k]
    if top_p < 1:
        limit = math.floor(top_p * sum(weights[i] for i in order))
        total = 0
        for length, i in enumerate(order, 1):
            total += weights[i]
            if total > limit:
                order = order[:length]
                break
    kept = {i for place, i in enumerate(order) if place == 0 or weights[i] >= math.floor(min_p * UNIT)}
    return [weight if i in kept else 0 for i, weight in enumerate(weights)]


def expected_token(weights: Sequence[int], uniform: float) -> int:
    total = sum(weights)
    target = min(math.floor(uniform * total), total - 1)
    return next(i for i, through in enumerate(itertools.accumulate(weights)) if through > target)


def test_the_first_published_row_keeps_two_tokens_and_draws_the_second() -> None:
    weights = OPS.weigh(torch.tensor([[2.0, 1.0, 0.5, -1.0]]), same(1, 0.5, 0, 0.9))
    assert (weights.weights_BV[0] > 0).tolist() == [True, True, False, False]
    assert OPS.draw(weights, torch.tensor([0.93], dtype=torch.float64)).tolist() == [1]


def test_the_second_published_row_keeps_three_tokens_and_draws_the_first() -> None:
    weights = OPS.weigh(torch.tensor([[3.0, 2.0, 2.0, 0.0, -1.0]]), same(1, 1.0, 0, 0.8))
    assert (weights.weights_BV[0] > 0).tolist() == [True, True, True, False, False]
    assert OPS.draw(weights, torch.tensor([0.55], dtype=torch.float64)).tolist() == [0]


def test_weights_are_the_floor_of_the_exponential_in_units_of_two_to_minus_31() -> None:
    x = torch.linspace(0, -25, 400)[None]
    weights = OPS.weigh(x, same(1)).weights_BV[0]
    exact = torch.tensor([math.floor(math.exp(value) * UNIT) for value in x[0].double().tolist()])
    assert int((weights - exact).abs().max()) <= 1
    assert (weights == exact).float().mean() > 0.99
    assert weights[0] == UNIT
    assert weights[-1] == 0


V = 101
EXTREME_K = (0, 1, 2, V - 1, V, V + 1, 10**9)
EXTREME_P = (0.0, 1e-9, 1e-7, 0.5, 0.9, 1 - 1e-7, 1.0)
EXTREME_MIN_P = (0.0, 1e-9, 0.5, 1.0)
TEMPERATURES = (0.0, 0.3, 1.0, 5.0)
MATRIX = list(itertools.product(TEMPERATURES, EXTREME_K, EXTREME_P, EXTREME_MIN_P))


def matrix_logits() -> torch.Tensor:
    """Rows of ordinary logits, of many ties, and of nothing but ties."""
    generator = torch.Generator().manual_seed(7)
    x_BV = torch.randn(len(MATRIX), V, generator=generator) * 3
    x_BV[1::3] = x_BV[1::3].round()
    x_BV[2::9] = 0.25
    x_BV[4::5, 7] = -INF
    return x_BV


def matrix_rows(facts: RowFacts | None = None) -> SamplingRows:
    temperature, top_k, top_p, min_p = zip(*MATRIX, strict=True)
    return rows(temperature, top_k, top_p, min_p, facts)


def test_extreme_filters_in_one_batch_keep_what_the_definition_keeps() -> None:
    x_BV = matrix_logits()
    weights = OPS.weigh(x_BV, matrix_rows())
    for row, settings in enumerate(MATRIX):
        expected = expected_weights(x_BV[row].tolist(), *settings)
        assert weights.weights_BV[row].tolist() == expected, settings
        assert weights.sums_B[row] == sum(expected)
        assert max(expected) == UNIT


def test_extreme_filters_one_row_at_a_time_give_the_bits_of_the_batch() -> None:
    x_BV = matrix_logits()
    settings = matrix_rows()
    batch = OPS.weigh(x_BV, settings)
    tokens = OPS.sample(x_BV, settings)
    for row in range(0, len(MATRIX), 19):
        alone = OPS.weigh(x_BV[row : row + 1], settings.slice(row, row + 1))
        assert torch.equal(alone.weights_BV[0], batch.weights_BV[row])
        assert OPS.sample(x_BV[row : row + 1], settings.slice(row, row + 1)).token_ids_B[0] == tokens.token_ids_B[row]


def test_drawn_tokens_are_the_first_whose_cumulative_weight_passes_the_target() -> None:
    x_BV = matrix_logits()
    weights = OPS.weigh(x_BV, matrix_rows())
    for uniform in (0.0, 2.0**-53, 0.3, 0.5, 0.93, 1 - 2.0**-53):
        tokens = OPS.draw(weights, torch.full((len(MATRIX),), uniform, dtype=torch.float64))
        for row in range(len(MATRIX)):
            assert tokens[row] == expected_token(weights.weights_BV[row].tolist(), uniform)


def test_sample_agrees_with_the_ops_it_is_made_of() -> None:
    x_BV = matrix_logits()
    settings = matrix_rows()
    drawn = OPS.draw(OPS.weigh(x_BV, settings), OPS.uniforms(settings.seeds_B, settings.streams_B))
    sampled = OPS.sample(x_BV, settings)
    assert torch.equal(sampled.token_ids_B, drawn)
    assert torch.equal(sampled.status_B, torch.zeros(len(MATRIX), dtype=torch.int32))


def test_no_result_depends_on_what_the_host_says_it_knows() -> None:
    x_BV = matrix_logits()
    keep = [row for row, (_, k, p, _) in enumerate(MATRIX) if p == 1 or 0 < k < V]
    settings = matrix_rows().select(torch.tensor(keep))
    largest = max(k for k in EXTREME_K if k < V)
    exact = RowFacts(has_forced=False, bounded_by_top_k=True, largest_top_k=largest)
    told = replace(settings, top_k_B=torch.where(settings.top_k_B < V, settings.top_k_B, 0), facts=exact)
    assert torch.equal(OPS.weigh(x_BV[keep], settings).weights_BV, OPS.weigh(x_BV[keep], told).weights_BV)
    plain = same(4)
    nothing = RowFacts(
        has_greedy=False,
        has_drawn=True,
        has_top_k=False,
        has_top_p=False,
        has_min_p=False,
        has_forced=False,
        bounded_by_top_k=True,
        largest_top_k=0,
    )
    assert torch.equal(
        OPS.weigh(x_BV[:4], plain).weights_BV,
        OPS.weigh(x_BV[:4], replace(plain, facts=nothing)).weights_BV,
    )


def test_a_step_known_to_be_greedy_gives_the_same_tokens() -> None:
    x_BV = matrix_logits()[:40]
    x_BV[3, 5], x_BV[4], x_BV[5, 9] = NAN, -INF, INF
    plain = same(40, 0.0, 5, 0.5)
    known = replace(plain, facts=RowFacts(has_drawn=False))
    assert torch.equal(OPS.sample(x_BV, known).token_ids_B, OPS.sample(x_BV, plain).token_ids_B)
    assert torch.equal(OPS.sample(x_BV, known).status_B, OPS.sample(x_BV, plain).status_B)


@pytest.mark.parametrize("top_k", [3, 4, 5, 6])
def test_ties_at_the_cut_go_to_the_lowest_ids(top_k: int) -> None:
    x = torch.tensor([[1.0, 2.0, 1.0, 5.0, 1.0, 2.0, 1.0]])
    kept = OPS.weigh(x, same(1, 1.0, top_k)).weights_BV[0].nonzero()[:, 0].tolist()
    assert kept == sorted([3, 1, 5, 0, 2, 4, 6][:top_k])


def test_top_p_keeps_one_more_token_when_the_prefix_only_reaches_its_share() -> None:
    # Four equal tokens: two of them hold exactly half, which is not more than half.
    x = torch.zeros(1, 4)
    assert (OPS.weigh(x, same(1, 1.0, 0, 0.5)).weights_BV > 0).tolist() == [[True, True, True, False]]
    assert (OPS.weigh(x, same(1, 1.0, 0, 0.4999)).weights_BV > 0).tolist() == [[True, True, False, False]]


def test_top_p_measures_its_share_of_what_top_k_left() -> None:
    x = torch.zeros(1, 8)
    assert int((OPS.weigh(x, same(1, 1.0, 4, 0.5)).weights_BV > 0).sum()) == 3


def test_a_wide_row_keeps_exactly_what_the_definition_keeps() -> None:
    x_BV = torch.randn(2, 5003, generator=torch.Generator().manual_seed(3)) * 2
    for top_k, top_p in ((0, 0.9), (50, 1.0), (700, 0.95)):
        weights = OPS.weigh(x_BV, same(2, 0.8, top_k, top_p))
        for row in range(2):
            assert weights.weights_BV[row].tolist() == expected_weights(x_BV[row].tolist(), 0.8, top_k, top_p, 0.0)


BROKEN = {
    "one NaN": ([1.0, NAN, 2.0], RowStatus.NAN),
    "all NaN": ([NAN, NAN, NAN], RowStatus.NAN),
    "one +inf": ([1.0, INF, 2.0], RowStatus.NAN),
    "two +inf": ([INF, 0.0, INF], RowStatus.NAN),
    "NaN and -inf": ([-INF, NAN, -INF], RowStatus.NAN),
    "+inf and NaN": ([INF, NAN, 0.0], RowStatus.NAN),
    "all -inf": ([-INF, -INF, -INF], RowStatus.EMPTY),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_has_a_status_and_no_token_and_leaves_its_neighbours_alone(name: str, temperature: float) -> None:
    values, status = BROKEN[name]
    x_BV = torch.tensor([[0.5, 1.0, -2.0], values, [3.0, -INF, 1.0]])
    settings = same(3, temperature, 2, 0.9, 0.1)
    weights = OPS.weigh(x_BV, settings)
    sampled = OPS.sample(x_BV, settings)
    assert weights.status_B.tolist() == [RowStatus.OK, status, RowStatus.OK]
    assert sampled.status_B.tolist() == [RowStatus.OK, status, RowStatus.OK]
    assert weights.weights_BV[1].tolist() == [0, 0, 0]
    assert sampled.token_ids_B[1] == -1
    for row in (0, 2):
        alone = OPS.weigh(x_BV[row : row + 1], settings.slice(row, row + 1))
        assert torch.equal(alone.weights_BV[0], weights.weights_BV[row])
        assert 0 <= sampled.token_ids_B[row] < 3


def test_a_forced_token_replaces_the_draw_of_a_good_row_only() -> None:
    x_BV = torch.tensor([[0.0, 9.0], [NAN, 0.0], [-INF, -INF], [9.0, -INF]])
    settings = same(4, 0.0)
    forced = replace(settings, forced_ids_B=torch.tensor([0, 1, 1, 1]))
    assert OPS.sample(x_BV, forced).token_ids_B.tolist() == [0, -1, -1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1.0, 1e308])
def test_one_finite_token_is_always_drawn(temperature: float) -> None:
    x_BV = torch.full((1, 5), -INF)
    x_BV[0, 3] = -12.5
    assert OPS.sample(x_BV, same(1, temperature)).token_ids_B.tolist() == [3]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-45, 1e-10, 1e-5, 1e-3])
@pytest.mark.parametrize("scale", [1e4, 3e38])
def test_tiny_temperatures_give_finite_weights_and_the_largest_logit(temperature: float, scale: float) -> None:
    x_BV = torch.tensor([[-scale, scale, 0.0, scale / 2]])
    weights = OPS.weigh(x_BV, same(1, temperature))
    assert weights.weights_BV.tolist() == [[0, UNIT, 0, 0]]
    assert OPS.sample(x_BV, same(1, temperature)).token_ids_B.tolist() == [1]


def test_temperature_zero_is_the_lowest_id_among_equals_for_every_seed_and_equals_top_k_1() -> None:
    two = [0.5, 7.0, 1.0, 7.0]
    zeros = [0.0, -0.0, 0.0, -0.0]
    x_BV = torch.tensor([two, zeros] * 50)
    tokens = OPS.sample(x_BV, same(100, 0.0)).token_ids_B
    assert tokens.tolist() == [1, 0] * 50
    assert torch.equal(OPS.sample(x_BV, same(100, 1.0, 1)).token_ids_B, tokens)


def test_near_ties_have_the_documented_odds_at_a_small_temperature() -> None:
    x_BV = torch.tensor([[1.0, 1.0 - 1e-6]])
    gap = float(x_BV[0, 0].double() - x_BV[0, 1].double())
    weights = OPS.weigh(x_BV, same(1, 1e-5)).weights_BV[0].double()
    assert float(weights[1] / weights[0]) == pytest.approx(math.exp(-gap / 1e-5), abs=1e-9)
    assert OPS.weigh(x_BV, same(1, 0.0)).weights_BV.tolist() == [[UNIT, 0]]


def test_a_million_draws_never_leave_the_kept_set() -> None:
    x_BV = torch.randn(1, 24, generator=torch.Generator().manual_seed(1)) * 4
    weights = OPS.weigh(x_BV, same(1, 0.7, 12, 0.95, 1e-4))
    kept = set(weights.weights_BV[0].nonzero()[:, 0].tolist())
    count = 1_000_000
    uniforms = uniform_53(torch.tensor(3), torch.arange(count))
    uniforms[0], uniforms[1] = 0.0, 1 - 2.0**-53
    many = TokenWeights(
        weights.weights_BV.expand(count, -1), weights.sums_B.expand(count), weights.status_B.expand(count)
    )
    tokens = OPS.draw(many, uniforms)
    assert set(tokens.unique().tolist()) == kept
    assert tokens[0] == min(kept)
    assert tokens[1] == max(kept)


def test_the_largest_sum_is_drawn_from_exactly() -> None:
    width = 129_280
    weights = TokenWeights(
        torch.full((3, width), UNIT), torch.full((3,), UNIT * width), torch.zeros(3, dtype=torch.int32)
    )
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert OPS.draw(weights, uniforms).tolist() == [0, width // 2, width - 1]


def test_no_rows_give_empty_results_and_no_columns_give_empty_rows() -> None:
    assert OPS.weigh(torch.zeros(0, 7), same(0)).weights_BV.shape == (0, 7)
    assert OPS.sample(torch.zeros(0, 7), same(0)).token_ids_B.shape == (0,)
    assert OPS.sample(torch.zeros(2, 0), same(2)).status_B.tolist() == [RowStatus.EMPTY] * 2
    assert OPS.sample(torch.zeros(2, 0), same(2)).token_ids_B.tolist() == [-1, -1]


@pytest.mark.parametrize("width", [7, 129, 4099])
def test_a_row_has_the_same_bits_in_every_batch_and_with_any_thread_count(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x_BV = torch.randn(33, width, generator=generator) * 5
    x_BV[::4] = NAN
    settings = rows([1.0, 0.0, 0.7] * 11, [0, 5, 0] * 11, [1.0, 1.0, 0.8] * 11, [0.0, 0.0, 0.01] * 11)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [OPS.weigh(x_BV[row : row + 1].clone(), settings.slice(row, row + 1)) for row in range(33)]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 7, 8, 16, 17, 33):
                batch = OPS.weigh(x_BV[33 - count :], settings.slice(33 - count, 33))
                for place in range(count):
                    assert torch.equal(batch.weights_BV[place], alone[33 - count + place].weights_BV[0])
    finally:
        torch.set_num_threads(before)


def test_inputs_are_not_changed() -> None:
    x_BV = matrix_logits()
    copy = x_BV.clone()
    settings = matrix_rows()
    OPS.weigh(x_BV, settings)
    OPS.sample(x_BV, settings)
    OPS.log_probabilities(x_BV, settings, torch.zeros(len(MATRIX), dtype=torch.int64), 3)
    OPS.raw_log_probabilities(x_BV, torch.zeros(len(MATRIX), dtype=torch.int64), 3)
    assert torch.equal(x_BV, copy)
