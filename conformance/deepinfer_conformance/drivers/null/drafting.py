"""Drafting of the null driver: nothing is attended to, every draft is token 0, and none is accepted.

Legend: R requests, n drafts a request, m = n + 1, B sampled rows, V vocabulary, K kept tokens, H heads, C head width.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.drafting import (
    DraftBlock,
    DraftDistributions,
    DraftingOps,
    DraftRuns,
    Proposals,
    Verdicts,
)
from deepinfer.accelerator.ops.sampling import WEIGHT_BITS, RowStatus, SampledTokens, SamplingRows
from deepinfer_conformance.drivers.host import OptionedGroup


class NullDrafting(OptionedGroup, DraftingOps):
    """Each run yields one token: 0, or the forced token of its first row."""

    def attend(
        self,
        query_RnHC: torch.Tensor,
        block_records_Rnb: torch.Tensor,
        window: WindowCache,
        sinks_H: torch.Tensor,
        window_size: int,
        block: DraftBlock,
    ) -> torch.Tensor:
        """Return zeros [R, n, H, C]."""
        del block_records_Rnb, window, sinks_H, window_size, block
        return torch.zeros_like(query_RnHC, memory_format=torch.contiguous_format)

    def propose(self, logits_BV: torch.Tensor, rows: SamplingRows, capacity: int) -> Proposals:
        """Return token 0 with all the mass."""
        del rows
        count = logits_BV.shape[0]
        ids_BK = logits_BV.new_full((count, capacity), -1, dtype=torch.int64)
        weights_BK = torch.zeros_like(ids_BK)
        ids_BK[:, :1], weights_BK[:, :1] = 0, 1 << WEIGHT_BITS
        zeros_B = ids_BK.new_zeros(count)
        return Proposals(zeros_B, _ok(zeros_B), ids_BK, weights_BK, weights_BK.sum(-1))

    def guess(self, logits_BV: torch.Tensor, rows: SamplingRows, reach: float) -> SampledTokens:
        """Return token 0."""
        del rows, reach
        zeros_B = logits_BV.new_zeros(logits_BV.shape[:1], dtype=torch.int64)
        return SampledTokens(zeros_B, _ok(zeros_B))

    def verify(
        self,
        logits_BV: torch.Tensor,
        rows: SamplingRows,
        runs: DraftRuns,
        distributions: DraftDistributions,
        resample_streams_B: torch.Tensor,
        accept_streams_B: torch.Tensor,
    ) -> Verdicts:
        """Reject every draft."""
        del logits_BV, distributions, resample_streams_B, accept_streams_B
        return _rejected(rows.forced_ids_B.clamp(min=0), runs)

    def match(self, tokens: SampledTokens, runs: DraftRuns) -> Verdicts:
        """Reject every draft."""
        return _rejected(tokens.token_ids_B, runs)


def _rejected(token_ids_B: torch.Tensor, runs: DraftRuns) -> Verdicts:
    token_ids_Rm = runs.token_ids_Rn.new_full((runs.counts_R.shape[0], runs.token_ids_Rn.shape[1] + 1), -1)
    token_ids_Rm[:, 0] = token_ids_B.index_select(0, runs.first_row_R)
    return Verdicts(token_ids_Rm, torch.zeros_like(runs.counts_R), _ok(runs.counts_R))


def _ok(like: torch.Tensor) -> torch.Tensor:
    return like.new_full(like.shape, int(RowStatus.OK), dtype=torch.int32)
