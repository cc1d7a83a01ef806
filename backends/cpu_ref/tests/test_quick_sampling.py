"""The quick ways through sampling against the readable ops: the same bits on every row, whichever way it goes.

Legend: B rows, V vocabulary, N listed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from deepinfer.accelerator.ops.sampling import RowFacts, RowStatus, SampledTokens, SamplingRows, TokenWeights
from deepinfer_cpu_ref.quick_blocks import BlockedRows, kept_blocks
from deepinfer_cpu_ref.quick_dense import WIDEST_VOCABULARY
from deepinfer_cpu_ref.quick_sampling import QuickSampling
from deepinfer_cpu_ref.sampling import CpuRefSampling, ReadableSampling

READABLE = ReadableSampling()
UNIT = 2**31
INF = math.inf
NAN = math.nan


class CountingOps(ReadableSampling):
    """Readable ops that remember how wide the rows were that they had to weigh."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def weigh(self, logits_BV: torch.Tensor, rows: SamplingRows) -> TokenWeights:
        self.widths.append(logits_BV.shape[1])
        return super().weigh(logits_BV, rows)


def choice(generator: torch.Generator, values: Sequence[float], count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (count,), generator=generator)]


def same_rows(
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingRows:
    return SamplingRows(
        temperature_B=torch.full((count,), temperature, dtype=torch.float64),
        top_k_B=torch.full((count,), top_k),
        top_p_B=torch.full((count,), top_p, dtype=torch.float64),
        min_weight_B=torch.full((count,), int(min_p * UNIT)),
        seeds_B=torch.arange(count) * 977 + 5,
        streams_B=torch.arange(count) * 4,
        forced_ids_B=torch.full((count,), -1),
    )


def mixed_rows(generator: torch.Generator, count: int, width: int) -> SamplingRows:
    """Every temperature with every filter, at their ends and inside."""
    temperatures = [0.0, 1.0, 1.0, 1.0, 0.7, 0.3, 5.0, 1e-3, 1e-45, 5e-324, 1e308, 100.0]
    return SamplingRows(
        temperature_B=choice(generator, temperatures, count, torch.float64),
        top_k_B=choice(
            generator,
            [0, 0, 0, 1, 2, 5, 50, width - 1, width, width + 1, 10**9, max(1, width // 3)],
            count,
            torch.int64,
        ),
        top_p_B=choice(generator, [1, 1, 0.9, 0.5, 0.99, 0.0, 1e-9, 1 - 1e-7, 1 - 2**-53], count, torch.float64),
        min_weight_B=choice(generator, [0, 0, 0, 1, 2, 2**20, 2**28, 2**31], count, torch.int64),
        seeds_B=torch.randint(-(2**62), 2**62, (count,), generator=generator),
        streams_B=torch.arange(count),
        forced_ids_B=choice(generator, [-1, -1, -1, 0, width - 1], count, torch.int64),
    )


def mixed_logits(generator: torch.Generator, count: int, width: int) -> torch.Tensor:
    """Flat, steep, far from zero, tied, masked, broken, and with one token above all others."""
    scales = choice(generator, [0.0, 0.1, 1.0, 3.0, 10.0, 50.0], count, torch.float32)
    middles = choice(generator, [0.0, -100.0, 5.0], count, torch.float32)
    x_BV = torch.randn(count, width, generator=generator) * scales[:, None] + middles[:, None]
    kinds = torch.arange(count) % 12
    places = torch.randint(width, (count,), generator=generator)
    x_BV[kinds % 3 == 1] = x_BV[kinds % 3 == 1].round()
    masked = torch.rand(count, width, generator=generator) < 0.5
    x_BV[(kinds % 4 == 1)[:, None] & masked] = -INF
    for kind, value in ((3, NAN), (4, INF)):
        rows = (kinds == kind).nonzero()[:, 0]
        x_BV[rows, places[rows]] = value
    x_BV[kinds == 5] = -INF
    rows = (kinds == 6).nonzero()[:, 0]
    x_BV[rows] = -INF
    x_BV[rows, places[rows]] = 3.0
    rows = (kinds == 7).nonzero()[:, 0]
    x_BV[rows, places[rows]] += 20
    return x_BV


def assert_same_sample(quick: SampledTokens, readable: SampledTokens) -> None:
    assert torch.equal(quick.status_B, readable.status_B)
    assert torch.equal(quick.token_ids_B, readable.token_ids_B)


CASES = [(seed, width, block) for seed, width in enumerate((1, 2, 7, 64, 65, 129, 700, 4100)) for block in (4, 64)]


@pytest.mark.parametrize(("seed", "width", "block"), CASES)
def test_tokens_and_statuses_are_those_of_the_readable_ops(seed: int, width: int, block: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    quick = QuickSampling(READABLE, block=block, least_vocabulary=1)
    x_BV = mixed_logits(generator, 96, width)
    for _ in range(3):
        rows = mixed_rows(generator, 96, width)
        assert_same_sample(quick.sample(x_BV, rows), READABLE.sample(x_BV, rows))


@pytest.mark.parametrize(("seed", "width", "block"), CASES)
def test_log_probabilities_are_those_of_the_readable_ops(seed: int, width: int, block: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    quick = QuickSampling(READABLE, block=block, least_vocabulary=1)
    x_BV = mixed_logits(generator, 48, width)
    rows = mixed_rows(generator, 48, width)
    chosen_B = torch.randint(-1, width, (48,), generator=generator)
    for count in (0, 3, width + 2):
        found = quick.log_probabilities(x_BV, rows, chosen_B, count)
        wanted = READABLE.log_probabilities(x_BV, rows, chosen_B, count)
        assert torch.equal(found.chosen_B, wanted.chosen_B)
        assert torch.equal(found.top_ids_BN, wanted.top_ids_BN)
        assert torch.equal(found.top_values_BN, wanted.top_values_BN)


def test_a_top_k_above_what_is_left_keeps_all_of_it_and_stays_a_filter() -> None:
    # One block of tokens that have weight, one with a token that has none, and others that are not even gathered.
    x_BV = torch.full((2, 1024), -90.0)
    x_BV[:, 128:192] = torch.randn(2, 64, generator=torch.Generator().manual_seed(13))
    x_BV[:, 700] = -25.0
    rows = same_rows(2, 1.0, 1000)
    quick = QuickSampling(READABLE, least_vocabulary=1)
    for chosen in (700, 0, 150):
        chosen_B = torch.tensor([chosen, chosen])
        found = quick.log_probabilities(x_BV, rows, chosen_B, 70)
        wanted = READABLE.log_probabilities(x_BV, rows, chosen_B, 70)
        assert torch.equal(found.chosen_B, wanted.chosen_B)
        assert torch.equal(found.top_ids_BN, wanted.top_ids_BN)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999, 1 - 2**-53])
def test_top_p_cuts_a_wide_row_where_sorting_it_does(scale: float, top_p: float) -> None:
    x_BV = torch.randn(6, 20_011, generator=torch.Generator().manual_seed(8)) * scale
    x_BV[1] = x_BV[1].round(decimals=1)
    x_BV[2, 77] += 9
    quick = QuickSampling(READABLE)
    for min_p in (0.0, 1e-7, 0.01):
        rows = same_rows(6, 0.9, 0, top_p, min_p)
        assert_same_sample(quick.sample(x_BV, rows), READABLE.sample(x_BV, rows))


@pytest.mark.parametrize("top_p", [0.8, 1 - 2**-53])
@pytest.mark.parametrize("lift", [-12.0, 8.0])
def test_a_sample_that_misleads_costs_time_and_nothing_else(top_p: float, lift: float) -> None:
    # What a sample sees is far from all others.
    x_BV = torch.randn(2, 8000, generator=torch.Generator().manual_seed(11))
    x_BV.view(2, -1, 64)[:, ::4, :8] += lift
    rows = same_rows(2, 1.0, 0, top_p)
    ops = CountingOps()
    assert_same_sample(QuickSampling(ops).sample(x_BV, rows), READABLE.sample(x_BV, rows))
    assert ops.widths == []


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "scale"),
    [
        (1.0, 50, 1.0, 0.0, 1.0),
        (1.0, 50, 0.9, 0.0, 1.0),
        (0.01, 0, 1.0, 0.0, 1.0),
        (1.0, 0, 0.9, 0.0, 30.0),
        (1.0, 0, 1.0, 0.5, 1.0),
        (1.0, 0, 1.0, 0.0, 1.0),
        (0.7, 0, 0.9, 0.0, 1.0),
        (0.0, 0, 0.9, 0.0, 1.0),
    ],
)
def test_ordinary_rows_are_never_weighed_whole_by_the_readable_ops(
    temperature: float, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    ops = CountingOps()
    x_BV = torch.randn(8, 16_384, generator=torch.Generator().manual_seed(6)) * scale
    QuickSampling(ops).sample(x_BV, same_rows(8, temperature, top_k, top_p, min_p))
    assert max(ops.widths, default=0) < 4096


def test_a_row_has_the_same_token_alone_and_in_a_batch_of_every_kind() -> None:
    generator = torch.Generator().manual_seed(17)
    quick = QuickSampling(READABLE, block=8, least_vocabulary=1)
    x_BV = mixed_logits(generator, 60, 1000)
    rows = mixed_rows(generator, 60, 1000)
    batch = quick.sample(x_BV, rows)
    for row in range(60):
        alone = quick.sample(x_BV[row : row + 1].clone(), rows.slice(row, row + 1))
        assert alone.token_ids_B[0] == batch.token_ids_B[row]
    order = torch.randperm(60, generator=generator)
    assert torch.equal(quick.sample(x_BV[order], rows.select(order)).token_ids_B, batch.token_ids_B[order])


def test_the_exponential_has_the_same_bits_wherever_an_element_stands() -> None:
    # Gathering rows and blocks moves elements; the quick ways are exact only if that changes no weight.
    x_N = torch.randn(4099, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 8 - 8
    whole_N = x_N.exp()
    for length in (1, 2, 3, 4, 5, 7, 8, 9, 15, 17, 31, 63, 64, 65, 1000):
        for start in (0, 1, 2, 3, 5, 64, 2001):
            part = x_N[start : start + length]
            assert torch.equal(part.clone().exp(), whole_N[start : start + length])
            assert torch.equal(part.clone()[:, None].expand(-1, 3).contiguous().exp()[:, 1], part.clone().exp())
    assert torch.equal(x_N.view(-1)[torch.arange(4098, -1, -1)].exp(), whole_N.flip(0))


def test_blocks_that_hold_a_token_of_positive_weight_are_kept() -> None:
    generator = torch.Generator().manual_seed(23)
    x_BV = mixed_logits(generator, 240, 256)
    rows = mixed_rows(generator, 240, 256)
    weights = READABLE.weigh(x_BV, rows)
    blocked = BlockedRows.of(x_BV, 4)
    kept_BN = kept_blocks(blocked.largest_BN, rows, 256, torch.full_like(rows.top_k_B, 31))
    has_weight_BN = (weights.weights_BV.view(240, 64, 4) > 0).any(-1)
    is_good_B = weights.status_B == RowStatus.OK
    assert not (has_weight_BN & ~kept_BN)[is_good_B].any()
    assert (~kept_BN)[is_good_B].float().mean() > 0.3


def test_facts_that_promise_less_than_they_could_change_nothing() -> None:
    x_BV = torch.randn(4, 5000, generator=torch.Generator().manual_seed(9))
    quick = QuickSampling(READABLE)
    exact = RowFacts(
        has_greedy=False,
        has_drawn=True,
        has_top_k=True,
        has_top_p=False,
        has_min_p=False,
        has_forced=False,
        bounded_by_top_k=True,
        largest_top_k=40,
    )
    rows = same_rows(4, 1.0, 40)
    assert_same_sample(quick.sample(x_BV, rows), quick.sample(x_BV, replace(rows, facts=exact)))
    greedy = same_rows(4, 0.0)
    known = replace(greedy, facts=replace(exact, has_greedy=True, has_drawn=False))
    assert_same_sample(quick.sample(x_BV, greedy), quick.sample(x_BV, known))


def test_logits_are_not_changed() -> None:
    generator = torch.Generator().manual_seed(3)
    x_BV = mixed_logits(generator, 36, 4100)
    before = x_BV.clone()
    CpuRefSampling().sample(x_BV, mixed_rows(generator, 36, 4100))
    assert torch.equal(x_BV.view(torch.int32), before.view(torch.int32))


def test_rows_that_lie_apart_in_memory_are_read_in_place() -> None:
    x_BV = torch.randn(10, 9000, generator=torch.Generator().manual_seed(5))[::2, 17:8209]
    assert not x_BV.is_contiguous()
    assert_same_sample(CpuRefSampling().sample(x_BV, same_rows(5)), READABLE.sample(x_BV, same_rows(5)))


def test_room_of_an_earlier_call_changes_nothing() -> None:
    quick = QuickSampling(READABLE)
    for seed, (count, width) in enumerate([(6, 5000), (3, 9000), (8, 4100)]):
        x_BV = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
        for top_p in (1.0, 0.9):
            rows = same_rows(count, 1.0, 0, top_p)
            with torch.inference_mode(seed % 2 == 0):
                assert_same_sample(quick.sample(x_BV, rows), READABLE.sample(x_BV, rows))


def test_only_what_the_quick_ways_are_exact_for_is_served_by_them() -> None:
    quick = QuickSampling(READABLE)
    assert quick.can_serve(torch.zeros(1, 4096))
    assert not quick.can_serve(torch.zeros(1, 4095))
    assert not quick.can_serve(torch.zeros(0, 4096))
    assert not quick.can_serve(torch.zeros(1, 4096, dtype=torch.bfloat16))
    assert not quick.can_serve(torch.zeros(4096, 4096).t())
    assert not quick.can_serve(torch.zeros(1, 1, dtype=torch.float32).expand(1, WIDEST_VOCABULARY + 1))
