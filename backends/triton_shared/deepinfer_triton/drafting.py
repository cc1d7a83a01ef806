"""Op group ``drafting``: a draft block's attention, drafts, and their verification.

Legend: R requests, n drafts a request, m = n + 1 most tokens of a run, T = R * n block rows, B sampled rows,
V vocabulary, K kept tokens, H heads, C head width, b record bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.drafting import (
    PLACEHOLDER,
    DraftBlock,
    DraftDistributions,
    DraftingOps,
    DraftRuns,
    Proposals,
    Verdicts,
)
from deepinfer.accelerator.ops.sampling import RowStatus, SampledTokens, SamplingRows
from deepinfer_triton import draft_draws, draft_judgement, draft_verdicts, token_draw
from deepinfer_triton.arithmetic import TritonGroup, refuse, require_dtype
from deepinfer_triton.attention_rows import AttentionRows
from deepinfer_triton.sampling import readable, weighed
from deepinfer_triton.sparse_attention import attend
from deepinfer_triton.token_weights import chunk_maxima


class TritonDraftAttention(TritonGroup, DraftingOps):
    """A block is a chunk whose rows all see the block's end: the kernels of sparse attention serve it as they are."""

    def attend(
        self,
        query_RnHC: Tensor,
        block_records_Rnb: Tensor,
        window: WindowCache,
        sinks_H: Tensor,
        window_size: int,
        block: DraftBlock,
    ) -> Tensor:
        """See :meth:`DraftingOps.attend`."""
        name = "drafting.attend"
        requests = block.context_R.shape[0]
        if query_RnHC.dim() != 4 or query_RnHC.shape[:2] != block_records_Rnb.shape[:2]:
            shapes = f"queries {tuple(query_RnHC.shape)} and block records {tuple(block_records_Rnb.shape)}"
            refuse(name, f"{shapes} do not describe the blocks of {requests} requests")
        if not 1 <= window_size <= window.ring:
            refuse(name, f"window_size is {window_size}; it must lie between 1 and the ring of {window.ring} positions")
        require_dtype(name, "context", block.context_R, torch.int64)
        drafts = query_RnHC.shape[1]
        out_THC = attend(
            name,
            self.arithmetic,
            query_RnHC.flatten(0, 1),
            block_records_Rnb.flatten(0, 1),
            window,
            None,
            sinks_H,
            window_size + drafts,
            _rows(block, drafts),
        )
        return out_THC.view(query_RnHC.shape)


class TritonDraftingOps(TritonDraftAttention):
    """The whole group; what is drawn and judged needs float64, as the sampler does."""

    def propose(self, logits_BV: Tensor, rows: SamplingRows, capacity: int) -> Proposals:
        """See :meth:`DraftingOps.propose`."""
        if capacity < 1:
            refuse("drafting.propose", f"capacity is {capacity}; a draft is drawn from at least one token")
        logits_BV = readable("drafting.propose", logits_BV)
        if logits_BV.numel() == 0:
            tokens = _no_tokens(rows)
            ids_BK = rows.seeds_B.new_full((logits_BV.shape[0], capacity), -1)
            nothing_B = torch.zeros_like(rows.seeds_B)
            return Proposals(tokens.token_ids_B, tokens.status_B, ids_BK, torch.zeros_like(ids_BK), nothing_B)
        found = weighed(logits_BV, chunk_maxima(logits_BV), rows.limited(capacity, logits_BV.shape[1]))
        uniforms_B = token_draw.uniforms(rows.seeds_B, rows.streams_B)
        return Proposals(
            token_draw.draw(*found, uniforms_B, None),
            found.status_B,
            *draft_draws.kept_tokens(found.weights_BV, capacity),
            found.sums_Bc.sum(-1),
        )

    def guess(self, logits_BV: Tensor, rows: SamplingRows, reach: float) -> SampledTokens:
        """See :meth:`DraftingOps.guess`."""
        if not 0 <= reach <= 1:
            refuse("drafting.guess", f"reach is {reach}; give a number from 0 to 1")
        logits_BV = readable("drafting.guess", logits_BV)
        if logits_BV.numel() == 0:
            return _no_tokens(rows)
        found = weighed(logits_BV, chunk_maxima(logits_BV), rows)
        uniforms_B = token_draw.uniforms(rows.seeds_B, rows.streams_B)
        return SampledTokens(draft_draws.guess(found, uniforms_B, reach), found.status_B)

    def verify(
        self,
        logits_BV: Tensor,
        rows: SamplingRows,
        runs: DraftRuns,
        distributions: DraftDistributions,
        resample_streams_B: Tensor,
        accept_streams_B: Tensor,
    ) -> Verdicts:
        """See :meth:`DraftingOps.verify`."""
        logits_BV = readable("drafting.verify", logits_BV)
        if 0 in (logits_BV.numel(), runs.counts_R.shape[0]):
            return _no_verdicts("drafting.verify", runs)
        maxima = chunk_maxima(logits_BV)
        streams = draft_judgement.VerificationStreams(resample_streams_B, accept_streams_B)
        return draft_verdicts.verify(weighed(logits_BV, maxima, rows), maxima, rows, runs, distributions, streams)

    def match(self, tokens: SampledTokens, runs: DraftRuns) -> Verdicts:
        """See :meth:`DraftingOps.match`."""
        if 0 in (tokens.token_ids_B.shape[0], runs.counts_R.shape[0]):
            return _no_verdicts("drafting.match", runs)
        return draft_judgement.match(tokens, runs)


def _no_tokens(rows: SamplingRows) -> SampledTokens:
    """Return what rows without a vocabulary, or no rows, give."""
    status_B = torch.full_like(rows.seeds_B, int(RowStatus.EMPTY), dtype=torch.int32)
    return SampledTokens(torch.full_like(rows.seeds_B, PLACEHOLDER), status_B)


def _no_verdicts(op_name: str, runs: DraftRuns) -> Verdicts:
    requests, drafts = runs.token_ids_Rn.shape
    if requests:
        refuse(op_name, f"{requests} requests name rows of a step without rows")
    none_R = torch.zeros_like(runs.counts_R)
    return Verdicts(runs.token_ids_Rn.new_full((0, drafts + 1), PLACEHOLDER), none_R, none_R.to(torch.int32))


def _rows(block: DraftBlock, drafts: int) -> AttentionRows:
    """Return the block's rows: they follow the context, and the newest position that each sees is the block's last."""
    requests = torch.arange(block.context_R.shape[0], device=block.context_R.device)

    def per_row(values_R: Tensor) -> Tensor:
        return values_R[:, None].expand(-1, drafts).reshape(-1)

    return AttentionRows(
        position_T=per_row(block.context_R + (drafts - 1)),
        request_T=per_row(requests),
        valid_T=per_row(block.valid_R),
        start_R=requests * drafts,
        cached_R=block.context_R,
        slot_R=block.state_slots_R,
        # The block itself is always seen.
        first_R=torch.minimum(block.window_start_R, block.context_R),
        table_RB=None,
    )
