"""Logit adjustments have the reference's bits."""

from __future__ import annotations

import torch

from deepinfer.accelerator.ops.sampling import (
    AllowedEntries,
    BiasEntries,
    LogitAdjustments,
    PenaltyEntries,
    TokenEntries,
)
from deepinfer_ascend.native_sampling import unpacked_bits


def places(draws, count, rows, vocabulary):
    flat = torch.randperm(rows * vocabulary, generator=draws)[:count]
    return flat // vocabulary, flat % vocabulary


def test_every_adjustment_has_the_references_bits(pair, draws):
    ours, reference = pair()
    rows, vocabulary = 4, 70
    logits_BV = torch.randn(rows, vocabulary, generator=draws)
    logits_BV[0, 5], logits_BV[1, 6] = float("nan"), torch.inf
    adjustments = LogitAdjustments(
        bias=BiasEntries(*places(draws, 20, rows, vocabulary), torch.randn(20, generator=draws)),
        penalties=PenaltyEntries(
            *places(draws, 30, rows, vocabulary),
            torch.rand(30, generator=draws) + 0.5,
            torch.randn(30, generator=draws),
        ),
        bans=TokenEntries(torch.tensor([0, 0, 1, 0]), torch.tensor([5, 6, 6, 6])),
        allowed=AllowedEntries(torch.tensor([2]), TokenEntries(torch.tensor([2, 2]), torch.tensor([8, 9]))),
        bitmask_BW=torch.randint(-(2**31), 2**31, (rows, 3), generator=draws).to(torch.int32),
    )
    found, wanted = logits_BV.clone(), logits_BV.clone()
    ours["sampling"].adjust(found, adjustments)
    reference["sampling"].adjust(wanted, adjustments)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_the_sign_bit_of_a_word_is_its_last_token():
    mask = torch.tensor([[-(2**31), 1]], dtype=torch.int32)
    assert unpacked_bits(mask, 40)[0].nonzero().flatten().tolist() == [31, 32]
