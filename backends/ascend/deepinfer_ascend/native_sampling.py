"""Logit adjustments. The integer sampler itself has no operator here: npu_top_k_top_p filters floats.

Legend: B sampled rows, V vocabulary, W words of a bitmask.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.accelerator.ops.sampling import LogitAdjustments, SamplingOps

WORD_BITS: Final = 32


class NativeSampling(SamplingOps):
    """Elementwise float32 operations at the named places."""

    def adjust(self, logits_BV: Tensor, adjustments: LogitAdjustments) -> None:
        """See :meth:`SamplingOps.adjust`."""
        bias, penalties, bans, allowed = (
            adjustments.bias,
            adjustments.penalties,
            adjustments.bans,
            adjustments.allowed,
        )
        if bias is not None:
            places = (bias.rows_N, bias.ids_N)
            logits_BV.index_put_(places, logits_BV[places] + bias.values_N)
        if penalties is not None:
            places = (penalties.rows_N, penalties.ids_N)
            seen_N = logits_BV[places]
            repeated_N = torch.where(seen_N > 0, seen_N / penalties.factors_N, seen_N * penalties.factors_N)
            logits_BV.index_put_(places, repeated_N - penalties.subtract_N)
        if bans is not None:
            places = (bans.rows_N, bans.ids_N)
            logits_BV.index_put_(places, logits_BV[places] - torch.inf)
        if allowed is not None:
            places = (allowed.entries.rows_N, allowed.entries.ids_N)
            kept_N = logits_BV[places]
            rows_M = (allowed.restricted_rows_M,)
            logits_BV.index_put_(rows_M, logits_BV[rows_M] - torch.inf)
            logits_BV.index_put_(places, kept_N)
        if adjustments.bitmask_BW is not None:
            allowed_BV = unpacked_bits(adjustments.bitmask_BW, logits_BV.shape[1])
            logits_BV.copy_(torch.where(allowed_BV, logits_BV, logits_BV - torch.inf))


def unpacked_bits(bitmask_BW: Tensor, vocabulary: int) -> Tensor:
    """Return the bits of an int32 [B, W] mask as bool [B, vocabulary], the lowest bit of a word first."""
    # The highest bit is the sign: its mask is the least int32.
    masks = [1 << bit for bit in range(WORD_BITS - 1)] + [-(1 << (WORD_BITS - 1))]
    masks_32 = torch.tensor(masks, dtype=torch.int32, device=bitmask_BW.device)
    return ((bitmask_BW[:, :, None] & masks_32) != 0).flatten(1)[:, :vocabulary]
