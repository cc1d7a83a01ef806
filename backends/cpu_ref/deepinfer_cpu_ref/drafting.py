"""The readable drafting ops: a block's attention over the shared context, drafts, and their verification.

Legend: R requests, n drafts a request, m = n + 1, T = R * n block rows, B sampled rows, V vocabulary, K kept tokens,
H heads, C head width, b record bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.drafting import (
    PLACEHOLDER,
    RESIDUAL_SHARE,
    DraftBlock,
    DraftDistributions,
    DraftingOps,
    DraftRuns,
    Proposals,
    Verdicts,
)
from deepinfer.accelerator.ops.sampling import (
    WEIGHT_BITS,
    RowStatus,
    SampledTokens,
    SamplingOps,
    SamplingRows,
    TokenWeights,
)
from deepinfer_cpu_ref.attention import CpuRefAttention
from deepinfer_cpu_ref.computation import Computation, refuse, require_float, require_width


class CpuRefDrafting(DraftingOps):
    """Written over the readable attention and the readable sampling, whose results these ops are defined by."""

    def __init__(self, computation: Computation, sampling: SamplingOps) -> None:
        self._attention = CpuRefAttention(computation)
        self._sampling = sampling

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
        _check_attend(query_RnHC, block_records_Rnb, window, sinks_H, window_size, block)
        addresses_Tn = _key_addresses(query_RnHC.shape[1], window, window_size, block)
        query_THC = query_RnHC.flatten(0, 1)
        output_THC = self._attention.over_records(
            query_THC, addresses_Tn, block_records_Rnb.flatten(0, 1), window, sinks_H
        )
        return output_THC.view(query_RnHC.shape)

    def propose(self, logits_BV: Tensor, rows: SamplingRows, capacity: int) -> Proposals:
        """See :meth:`DraftingOps.propose`."""
        if capacity < 1:
            refuse("drafting.propose", f"capacity is {capacity}; a draft is drawn from at least one token")
        vocabulary = logits_BV.shape[1]
        weights = self._sampling.weigh(logits_BV, rows.limited(capacity, vocabulary))
        uniforms_B = self._sampling.uniforms(rows.seeds_B, rows.streams_B)
        token_ids_B = self._sampling.draw(weights, uniforms_B)
        # Ascending ids of the tokens with mass; the vocabulary itself stands for "none" and sorts last.
        ids_V = torch.arange(vocabulary, device=logits_BV.device)
        ids_BK = torch.where(weights.weights_BV > 0, ids_V, vocabulary).sort(-1).values[:, :capacity]
        missing = capacity - ids_BK.shape[1]
        ids_BK = torch.nn.functional.pad(ids_BK, (0, missing), value=vocabulary)
        is_kept_BK = ids_BK < vocabulary
        kept_BK = weights.weights_BV.gather(1, ids_BK.masked_fill(~is_kept_BK, 0)) if vocabulary else ids_BK
        return Proposals(
            token_ids_B=token_ids_B,
            status_B=weights.status_B,
            ids_BK=ids_BK.masked_fill(~is_kept_BK, -1),
            weights_BK=kept_BK.masked_fill(~is_kept_BK, 0),
            sums_B=weights.sums_B,
        )

    def guess(self, logits_BV: Tensor, rows: SamplingRows, reach: float) -> SampledTokens:
        """See :meth:`DraftingOps.guess`."""
        if not 0 <= reach <= 1:
            refuse("drafting.guess", f"reach is {reach}; give a number from 0 to 1")
        weights = self._sampling.weigh(logits_BV, rows)
        if 0 in logits_BV.shape:
            return SampledTokens(torch.full_like(weights.sums_B, PLACEHOLDER), weights.status_B)
        uniforms_B = self._sampling.uniforms(rows.seeds_B, rows.streams_B)
        target_B = torch.minimum((uniforms_B * weights.sums_B).floor().to(torch.int64), weights.sums_B - 1)
        spread_B = reach * (uniforms_B * (1 - uniforms_B)).sqrt()
        distance_B = (spread_B * weights.sums_B).floor().to(torch.int64)
        ends_BV = weights.weights_BV.cumsum(-1)
        starts_BV = ends_BV - weights.weights_BV
        upper_BV = torch.minimum(ends_BV, (target_B + distance_B + 1)[:, None])
        lower_BV = torch.maximum(starts_BV, (target_B - distance_B)[:, None])
        # A token without mass has an empty interval, and may not win where all shares are equal.
        shared_BV = (upper_BV - lower_BV).masked_fill(weights.weights_BV == 0, -1)
        token_ids_B = _lowest_largest(shared_BV)
        return SampledTokens(torch.where(weights.status_B == RowStatus.OK, token_ids_B, PLACEHOLDER), weights.status_B)

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
        if logits_BV.shape[0] == 0 or runs.counts_R.shape[0] == 0:
            return _no_verdicts(runs)
        weights = self._sampling.weigh(logits_BV, rows)
        laid = _Laid.of(runs)
        row_Rn = laid.row_Rm[:, :-1]
        draft_Rn = runs.token_ids_Rn.clamp(min=0)
        target_Rn = weights.weights_BV[row_Rn, draft_Rn] / weights.sums_B[row_Rn].to(torch.float64)
        coins_B = self._sampling.uniforms(rows.seeds_B, accept_streams_B)
        accepts_Rn = coins_B[row_Rn] * _drafted_with(distributions, draft_Rn) < target_Rn
        forced_Rn = rows.forced_ids_B[row_Rn]
        accepts_Rn = torch.where(forced_Rn >= 0, forced_Rn == draft_Rn, accepts_Rn)
        accepts_Rn &= weights.status_B[row_Rn] == RowStatus.OK
        accepted_R = laid.accepted(accepts_Rn)

        last_R = runs.first_row_R + accepted_R
        rejected_R = accepted_R < laid.usable_R
        fresh = TokenWeights(weights.weights_BV[last_R], weights.sums_B[last_R], weights.status_B[last_R])
        left_RV = _residual(fresh, distributions, accepted_R)
        left = TokenWeights(left_RV, left_RV.sum(-1), fresh.status_B)
        seeds_R = rows.seeds_B[last_R]
        after_rejection_R = self._sampling.draw(left, self._sampling.uniforms(seeds_R, resample_streams_B[last_R]))
        nothing_left_R = left.sums_B == 0
        after_rejection_R = torch.where(nothing_left_R, _lowest_largest(logits_BV[last_R]), after_rejection_R)
        without_draft_R = self._sampling.draw(fresh, self._sampling.uniforms(seeds_R, rows.streams_B[last_R]))
        own_R = torch.where(rejected_R, after_rejection_R, without_draft_R)
        own_R = torch.where(rows.forced_ids_B[last_R] >= 0, rows.forced_ids_B[last_R], own_R)
        return laid.verdicts(accepted_R, own_R, fresh.status_B)

    def match(self, tokens: SampledTokens, runs: DraftRuns) -> Verdicts:
        """See :meth:`DraftingOps.match`."""
        if tokens.token_ids_B.shape[0] == 0 or runs.counts_R.shape[0] == 0:
            return _no_verdicts(runs)
        laid = _Laid.of(runs)
        row_Rn = laid.row_Rm[:, :-1]
        accepts_Rn = runs.token_ids_Rn == tokens.token_ids_B[row_Rn]
        accepts_Rn &= tokens.status_B[row_Rn] == RowStatus.OK
        accepted_R = laid.accepted(accepts_Rn)
        last_R = runs.first_row_R + accepted_R
        return laid.verdicts(accepted_R, tokens.token_ids_B[last_R], tokens.status_B[last_R])


@dataclass(frozen=True, slots=True)
class _Laid:
    """The places of the runs.

    Attributes:
        runs: as given.
        usable_R: how many drafts of each run come before its end and its first placeholder.
        row_Rm: row of each place; places behind a run's end name its last row.
    """

    runs: DraftRuns
    usable_R: Tensor
    row_Rm: Tensor

    @classmethod
    def of(cls, runs: DraftRuns) -> _Laid:
        places_m = torch.arange(runs.token_ids_Rn.shape[1] + 1, device=runs.counts_R.device)
        is_draft_Rn = (places_m[:-1] < runs.counts_R[:, None]) & (runs.token_ids_Rn >= 0)
        row_Rm = runs.first_row_R[:, None] + torch.minimum(places_m, runs.counts_R[:, None])
        return cls(runs, _leading(is_draft_Rn), row_Rm)

    def accepted(self, accepts_Rn: Tensor) -> Tensor:
        """Return how many usable drafts come before the first that is not accepted."""
        return torch.minimum(_leading(accepts_Rn), self.usable_R)

    def verdicts(self, accepted_R: Tensor, own_R: Tensor, status_R: Tensor) -> Verdicts:
        """Join accepted drafts and the target's own token."""
        places_m = torch.arange(self.row_Rm.shape[1], device=own_R.device)
        token_ids_Rm = torch.nn.functional.pad(self.runs.token_ids_Rn, (0, 1), value=-1)
        token_ids_Rm = torch.where(places_m < accepted_R[:, None], token_ids_Rm, -1)
        own_R1 = torch.where(status_R == RowStatus.OK, own_R, -1)[:, None]
        return Verdicts(torch.where(places_m == accepted_R[:, None], own_R1, token_ids_Rm), accepted_R, status_R)


def _leading(flags_Rn: Tensor) -> Tensor:
    """Return int64 [R]: how many flags are set before the first that is not."""
    return flags_Rn.to(torch.int64).cumprod(-1).sum(-1)


def _no_verdicts(runs: DraftRuns) -> Verdicts:
    requests, drafts = runs.token_ids_Rn.shape
    if requests:
        refuse("drafting", f"{requests} requests name rows of a step without rows")
    none_R = torch.zeros_like(runs.counts_R)
    return Verdicts(runs.token_ids_Rn.new_full((0, drafts + 1), -1), none_R, none_R.to(torch.int32))


def _lowest_largest(values_BV: Tensor) -> Tensor:
    """Return each row's lowest id among the largest values; 0 where the row holds NaN."""
    ids_V = torch.arange(values_BV.shape[1], device=values_BV.device)
    largest_B1 = values_BV.amax(-1, keepdim=True)
    lowest_B = torch.where(values_BV == largest_B1, ids_V, values_BV.shape[1]).amin(-1)
    return lowest_B.masked_fill(lowest_B == values_BV.shape[1], 0)


def _drafted_with(distributions: DraftDistributions, draft_Rn: Tensor) -> Tensor:
    """Return float64 [R, n]: the probability with which each draft was drawn."""
    is_draft_RnK = distributions.ids_RnK == draft_Rn[:, :, None]
    weight_Rn = torch.where(is_draft_RnK, distributions.weights_RnK, 0).sum(-1)
    return weight_Rn / distributions.sums_Rn.to(torch.float64)


def _residual(target: TokenWeights, distributions: DraftDistributions, place_R: Tensor) -> Tensor:
    """Return int64 [R, V]: what the target has more of than the draft at a place; places behind the end give anything.

    Tokens outside the draft's kept set have no share of it, so only the kept ones are computed a second time.
    """
    shares_RV = target.weights_BV / target.sums_B.to(torch.float64)[:, None]
    left_RV = _as_integers(shares_RV)
    if not distributions.ids_RnK.shape[1] or not left_RV.shape[1]:
        return left_RV
    places_R11 = place_R.clamp(max=distributions.ids_RnK.shape[1] - 1)[:, None, None]
    kept = distributions.ids_RnK.shape[2]
    ids_RK = distributions.ids_RnK.gather(1, places_R11.expand(-1, 1, kept))[:, 0]
    weights_RK = distributions.weights_RnK.gather(1, places_R11.expand(-1, 1, kept))[:, 0]
    sums_R1 = distributions.sums_Rn.gather(1, places_R11[:, :, 0]).to(torch.float64)
    taken_RK = RESIDUAL_SHARE * (weights_RK / sums_R1)
    known_RK = ids_RK.clamp(min=0)
    # One more column takes the places without a token, so that they write nowhere.
    left_RV = torch.nn.functional.pad(left_RV, (0, 1))
    where_RK = torch.where(ids_RK >= 0, known_RK, left_RV.shape[1] - 1)
    left_RV.scatter_(1, where_RK, _as_integers(shares_RV.gather(1, known_RK) - taken_RK))
    return left_RV[:, :-1].contiguous()


def _as_integers(shares: Tensor) -> Tensor:
    """Return ``floor(max(x, 0) * 2**31)``; rows that are not OK (NaN) give 0."""
    return (shares.nan_to_num(nan=0.0).clamp(min=0) * 2.0**WEIGHT_BITS).floor().to(torch.int64)


def _key_addresses(drafts: int, window: WindowCache, window_size: int, block: DraftBlock) -> Tensor:
    """Return int64 [T, window_size + n]: ``T + slot`` of the ring, oldest first, then block rows; -1 for no key."""
    requests = block.context_R.shape[0]
    back = torch.arange(window_size, 0, -1, device=block.context_R.device)
    position_Rw = block.context_R[:, None] - back
    slot_Rw = block.state_slots_R[:, None] * window.ring + position_Rw % window.ring + requests * drafts
    first_R1 = block.window_start_R.clamp(min=0)[:, None]
    slot_Rw = slot_Rw.masked_fill(position_Rw < first_R1, -1)
    own_Rn = torch.arange(requests * drafts, device=back.device).view(requests, drafts)
    address_Rn = torch.cat((slot_Rw, own_Rn), 1).masked_fill(~block.valid_R[:, None], -1)
    return address_Rn.repeat_interleave(drafts, 0)


def _check_attend(
    query_RnHC: Tensor,
    block_records_Rnb: Tensor,
    window: WindowCache,
    sinks_H: Tensor,
    window_size: int,
    block: DraftBlock,
) -> None:
    name = "drafting.attend"
    require_float(name, "query", query_RnHC)
    require_width(name, "query", query_RnHC, window.format.width)
    require_width(name, "block records", block_records_Rnb, window.format.nbytes)
    requests = block.context_R.shape[0]
    if query_RnHC.dim() != 4 or query_RnHC.shape[0] != requests or query_RnHC.shape[:2] != block_records_Rnb.shape[:2]:
        refuse(
            name,
            f"queries {tuple(query_RnHC.shape)} and block records {tuple(block_records_Rnb.shape)} do not describe "
            f"the blocks of {requests} requests",
        )
    if sinks_H.shape != query_RnHC.shape[2:3]:
        refuse(name, f"sinks have shape {tuple(sinks_H.shape)}; give one for each of {query_RnHC.shape[2]} heads")
    if not 1 <= window_size <= window.ring:
        refuse(name, f"window_size is {window_size}; it must lie between 1 and the ring of {window.ring} positions")
