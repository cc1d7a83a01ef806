"""Draws follow the stated distribution; the test is shown to fail for a temperature off by 5 % or a filter off by one.

Seeds are fixed, so nothing here is random from run to run.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer.sampling.streams import DrawCase, stream
from deepinfer_cpu_ref.sampling import CpuRefSampling

OPS = CpuRefSampling()
DRAWS = 200_000
LOGITS = torch.tensor([[1.7, 0.2, -0.4, 2.1, 0.9, 1.1, -1.3, 0.0, 0.6, 1.4, -0.7, 0.3]])
WIDTH = LOGITS.shape[1]


def settings(
    temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1, count: int = DRAWS
) -> SamplingRows:
    def fill(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype)

    return SamplingRows(
        temperature_B=fill(temperature, torch.float64),
        top_k_B=fill(top_k, torch.int64),
        top_p_B=fill(top_p, torch.float64),
        min_weight_B=fill(int(min_p * 2**31), torch.int64),
        seeds_B=fill(seed, torch.int64),
        streams_B=torch.arange(count) * 4,
        forced_ids_B=fill(-1, torch.int64),
    )


def probabilities(temperature: float, kept: list[int]) -> torch.Tensor:
    """The distribution by the textbook: a softmax over the kept tokens."""
    x = torch.full((WIDTH,), -math.inf, dtype=torch.float64)
    x[kept] = LOGITS[0, kept].double()
    return (x / temperature).softmax(-1)


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's statistic, divided by its 99.9 % point (Wilson and Hilferty): above 1 means rejected."""
    if bool((observed[expected == 0] > 0).any()):
        return math.inf
    present = expected > 0
    statistic = float(((observed - expected)[present] ** 2 / expected[present]).sum())
    freedom = int(present.sum()) - 1
    if freedom == 0:
        return statistic
    spread = 2 / (9 * freedom)
    return statistic / (freedom * (1 - spread + 3.0902 * math.sqrt(spread)) ** 3)


def counts(rows: SamplingRows) -> torch.Tensor:
    tokens = OPS.sample(LOGITS.expand(len(rows.seeds_B), -1), rows).token_ids_B
    return torch.bincount(tokens, minlength=WIDTH).double()


def best(count: int) -> list[int]:
    return LOGITS[0].argsort(descending=True)[:count].tolist()


@pytest.mark.parametrize(("seed", "temperature"), [(1, 0.5), (1, 1.0), (1, 2.0), (2, 1.0), (2**62, 1.0), (-5, 1.0)])
def test_unfiltered_draws_follow_the_softmax(seed: int, temperature: float) -> None:
    observed = counts(settings(temperature, seed=seed))
    assert chi_square(observed, probabilities(temperature, list(range(WIDTH))) * DRAWS) < 1


@pytest.mark.parametrize("wrong", [1.05, 0.95])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_temperature_off_by_5_percent_is_noticed(temperature: float, wrong: float) -> None:
    observed = counts(settings(temperature * wrong))
    assert chi_square(observed, probabilities(temperature, list(range(WIDTH))) * DRAWS) > 2


@pytest.mark.parametrize("top_k", [1, 2, 5, 11])
def test_top_k_draws_follow_the_softmax_of_the_best_k(top_k: int) -> None:
    assert chi_square(counts(settings(top_k=top_k)), probabilities(0.8, best(top_k)) * DRAWS) < 1


@pytest.mark.parametrize("top_k", [2, 5, 10])
@pytest.mark.parametrize("error", [-1, 1])
def test_a_top_k_off_by_one_is_noticed(top_k: int, error: int) -> None:
    assert chi_square(counts(settings(top_k=top_k + error)), probabilities(0.8, best(top_k)) * DRAWS) > 2


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.9, 0.99])
def test_top_p_draws_follow_the_softmax_of_the_shortest_prefix(top_p: float) -> None:
    cumulative = probabilities(0.8, list(range(WIDTH)))[best(WIDTH)].cumsum(0)
    length = int((cumulative <= top_p).sum()) + 1
    observed = counts(settings(top_p=top_p))
    assert chi_square(observed, probabilities(0.8, best(length)) * DRAWS) < 1
    for wrong in {length - 1, length + 1} & set(range(1, WIDTH + 1)):
        assert chi_square(observed, probabilities(0.8, best(wrong)) * DRAWS) > 2


@pytest.mark.parametrize("min_p", [0.02, 0.1, 0.4])
def test_min_p_draws_follow_the_softmax_of_the_likely_enough(min_p: float) -> None:
    whole = probabilities(0.8, list(range(WIDTH)))
    length = int((whole >= min_p * whole.max()).sum())
    observed = counts(settings(min_p=min_p))
    assert chi_square(observed, probabilities(0.8, best(length)) * DRAWS) < 1
    assert chi_square(observed, probabilities(0.8, best(length - 1)) * DRAWS) > 2
    assert chi_square(observed, probabilities(0.8, best(length + 1)) * DRAWS) > 2


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_draws_of_neighbouring_tokens_are_independent(lag: int) -> None:
    tokens = OPS.sample(LOGITS.expand(DRAWS, -1), settings()).token_ids_B
    pairs = torch.bincount(tokens[:-lag] * WIDTH + tokens[lag:], minlength=WIDTH**2).double()
    single = probabilities(0.8, list(range(WIDTH)))
    expected = (single[:, None] * single[None]).flatten() * (DRAWS - lag)
    assert chi_square(pairs, expected) < 1
    repeated = torch.bincount(tokens * WIDTH + tokens, minlength=WIDTH**2).double()
    assert chi_square(repeated, expected) > 2


def test_draws_of_one_token_under_neighbouring_seeds_follow_the_softmax() -> None:
    rows = settings()
    by_seed = replace(rows, seeds_B=torch.arange(DRAWS), streams_B=torch.full((DRAWS,), stream(16_389)))
    assert chi_square(counts(by_seed), probabilities(0.8, list(range(WIDTH))) * DRAWS) < 1


def test_the_cases_of_one_token_are_independent() -> None:
    draws = [OPS.uniforms(torch.full((DRAWS,), 9), torch.arange(DRAWS) * 4 + case) for case in DrawCase]
    bins = [(draw * 10).long() for draw in draws]
    for first in range(4):
        for second in range(first):
            table = torch.bincount(bins[first] * 10 + bins[second], minlength=100).double()
            assert chi_square(table, torch.full((100,), DRAWS / 100, dtype=torch.float64)) < 1
