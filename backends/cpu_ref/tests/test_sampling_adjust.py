"""Logit adjustments of the reference: order, exactness, neighbours, masks that hide nothing broken."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.accelerator.ops.sampling import (
    AllowedEntries,
    BiasEntries,
    LogitAdjustments,
    PenaltyEntries,
    RowStatus,
    SamplingRows,
    TokenEntries,
)
from deepinfer_cpu_ref.sampling import CpuRefSampling, unpack_bitmask

OPS = CpuRefSampling()
INF = math.inf
NAN = math.nan


def places(*pairs: tuple[int, int]) -> TokenEntries:
    return TokenEntries(
        torch.tensor([row for row, _ in pairs], dtype=torch.int64),
        torch.tensor([i for _, i in pairs], dtype=torch.int64),
    )


def bias(entries: dict[tuple[int, int], float]) -> BiasEntries:
    where = places(*entries)
    return BiasEntries(where.rows_N, where.ids_N, torch.tensor(list(entries.values()), dtype=torch.float32))


def penalties(entries: dict[tuple[int, int], tuple[float, float]]) -> PenaltyEntries:
    where = places(*entries)
    factors, subtract = zip(*entries.values(), strict=True)
    return PenaltyEntries(where.rows_N, where.ids_N, torch.tensor(factors), torch.tensor(subtract))


def adjusted(logits: list[list[float]], **parts: object) -> list[list[float]]:
    x_BV = torch.tensor(logits)
    OPS.adjust(x_BV, LogitAdjustments(**parts))  # type: ignore[arg-type]
    return x_BV.tolist()


def status(logits: list[list[float]], **parts: object) -> list[int]:
    x_BV = torch.tensor(logits)
    OPS.adjust(x_BV, LogitAdjustments(**parts))  # type: ignore[arg-type]
    count = len(logits)
    zeros = torch.zeros(count, dtype=torch.int64)
    ones = torch.ones(count, dtype=torch.float64)
    return OPS.sample(x_BV, SamplingRows(ones, zeros, ones, zeros, zeros, zeros, zeros - 1)).status_B.tolist()


def test_nothing_asked_changes_nothing() -> None:
    assert adjusted([[1.0, -2.0]]) == [[1.0, -2.0]]


def test_a_bias_is_added_where_it_is_named_and_nowhere_else() -> None:
    assert adjusted([[1.0, 2.0], [3.0, 4.0]], bias=bias({(0, 1): 0.5, (1, 0): -9.0})) == [[1.0, 2.5], [-6.0, 4.0]]


def test_repetition_divides_positive_and_multiplies_negative_logits() -> None:
    found = adjusted([[3.0, -3.0, 0.0, 5.0]], penalties=penalties({(0, i): (2.0, 0.0) for i in range(3)}))
    assert found == [[1.5, -6.0, 0.0, 5.0]]


def test_additive_penalties_are_subtracted_after_the_repetition() -> None:
    assert adjusted([[3.0, -3.0]], penalties=penalties({(0, 0): (2.0, 0.5), (0, 1): (2.0, -0.5)})) == [[1.0, -5.5]]


def test_penalties_see_the_logit_with_its_bias() -> None:
    found = adjusted([[-1.0]], bias=bias({(0, 0): 5.0}), penalties=penalties({(0, 0): (2.0, 0.0)}))
    assert found == [[2.0]]


def test_banned_tokens_are_out_and_duplicates_do_no_harm() -> None:
    found = adjusted([[1.0, 2.0, 3.0]], bans=places((0, 1), (0, 1), (0, 2)))
    assert found == [[1.0, -INF, -INF]]


def test_a_bias_does_not_bring_a_banned_token_back() -> None:
    assert adjusted([[1.0, 2.0]], bias=bias({(0, 0): 1e6}), bans=places((0, 0))) == [[-INF, 2.0]]


def test_allowed_ids_mask_all_others_of_their_rows_only() -> None:
    allowed = AllowedEntries(torch.tensor([0, 2]), places((0, 1), (2, 0), (2, 0)))
    found = adjusted([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], allowed=allowed)
    assert found == [[-INF, 2.0], [3.0, 4.0], [5.0, -INF]]


def test_an_allowed_token_that_is_banned_is_out() -> None:
    allowed = AllowedEntries(torch.tensor([0]), places((0, 0), (0, 1)))
    assert adjusted([[1.0, 2.0, 3.0]], bans=places((0, 0)), allowed=allowed) == [[-INF, 2.0, -INF]]


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 101])
def test_a_bitmask_keeps_the_tokens_whose_bits_are_set(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    allowed_BV = torch.rand(3, vocabulary, generator=generator) < 0.5
    allowed_BV[1] = True
    words = -(-vocabulary // 32)
    bitmask_BW = torch.zeros(3, words, dtype=torch.int32)
    for row in range(3):
        for word in range(words):
            bits = sum(1 << (i % 32) for i in range(word * 32, min(word * 32 + 32, vocabulary)) if allowed_BV[row, i])
            bitmask_BW[row, word] = bits - 2**32 if bits >= 2**31 else bits
    bitmask_BW[1] = -1
    assert torch.equal(unpack_bitmask(bitmask_BW, vocabulary), allowed_BV)
    x_BV = torch.randn(3, vocabulary, generator=generator)
    masked_BV = x_BV.clone()
    OPS.adjust(masked_BV, LogitAdjustments(bitmask_BW=bitmask_BW))
    assert torch.equal(masked_BV, torch.where(allowed_BV, x_BV, -INF))


@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_mask_never_hides_what_the_model_broke(broken: float) -> None:
    logits = [[1.0, broken, 2.0]]
    assert status(logits, bans=places((0, 1))) == [RowStatus.NAN]
    assert status(logits, allowed=AllowedEntries(torch.tensor([0]), places((0, 2)))) == [RowStatus.NAN]
    assert status(logits, bitmask_BW=torch.tensor([[0b101]], dtype=torch.int32)) == [RowStatus.NAN]
    assert status(logits, penalties=penalties({(0, 1): (2.0, 1.0)})) == [RowStatus.NAN]


def test_masks_that_leave_nothing_empty_only_their_row() -> None:
    logits = [[1.0, 2.0], [3.0, 4.0]]
    assert status(logits, bans=places((0, 0), (0, 1))) == [RowStatus.EMPTY, RowStatus.OK]
    assert status(logits, allowed=AllowedEntries(torch.tensor([1]), places())) == [RowStatus.OK, RowStatus.EMPTY]
    mask = torch.tensor([[-1], [0]], dtype=torch.int32)
    assert status(logits, bitmask_BW=mask) == [RowStatus.OK, RowStatus.EMPTY]


def test_adjusting_no_rows_does_nothing() -> None:
    x_BV = torch.zeros(0, 3)
    OPS.adjust(x_BV, LogitAdjustments(bans=places(), bitmask_BW=torch.zeros(0, 1, dtype=torch.int32)))
    assert x_BV.shape == (0, 3)


def test_empty_lists_change_nothing() -> None:
    assert adjusted([[1.0, 2.0]], bans=places(), bias=bias({})) == [[1.0, 2.0]]
