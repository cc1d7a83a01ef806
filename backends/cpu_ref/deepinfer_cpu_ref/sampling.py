"""The readable sampling ops: integer weights, one integer key per token, thresholds instead of rankings.

All filters keep a prefix of one total order (weight descending, id ascending). An integer key that holds the weight
in its high bits and the reversed id in its low bits is unique and has that order, so each filter becomes a least
key, and ties need no thought.

Rows are worked in pieces that fit a cache; a row's result cannot depend on its piece, because every step is
elementwise, a maximum, or a sum of integers.

Legend: B sampled rows, V vocabulary, N listed tokens, K places of the order that can matter, C block of the draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepinfer.accelerator.ops.sampling import (
    NO_MASS,
    NORMALISER_BITS,
    WEIGHT_BITS,
    LogitAdjustments,
    RowStatus,
    SampledTokens,
    SamplingOps,
    SamplingRows,
    TokenLogProbabilities,
    TokenWeights,
)
from deepinfer.numerics import uniform_53
from deepinfer_cpu_ref.quick_sampling import QuickSampling

_ID_BITS = 31
_LARGEST_ID = 2**_ID_BITS - 1
_DRAW_BLOCK = 256
_PIECE_ELEMENTS = 2**18
_WORD_BITS = 32


class ReadableSampling(SamplingOps):
    """Device-agnostic torch, class R2."""

    def adjust(self, logits_BV: torch.Tensor, adjustments: LogitAdjustments) -> None:
        """See the contract."""
        bias, penalties, bans = adjustments.bias, adjustments.penalties, adjustments.bans
        if bias is not None:
            places = (bias.rows_N, bias.ids_N)
            logits_BV[places] = logits_BV[places] + bias.values_N
        if penalties is not None:
            places = (penalties.rows_N, penalties.ids_N)
            seen_N = logits_BV[places]
            repeated_N = torch.where(seen_N > 0, seen_N / penalties.factors_N, seen_N * penalties.factors_N)
            logits_BV[places] = repeated_N - penalties.subtract_N
        if bans is not None:
            # Duplicates write the same value, whichever wins.
            places = (bans.rows_N, bans.ids_N)
            logits_BV[places] = logits_BV[places] - torch.inf
        if adjustments.allowed is not None:
            entries = adjustments.allowed.entries
            places = (entries.rows_N, entries.ids_N)
            allowed_N = logits_BV[places]
            restricted_M = adjustments.allowed.restricted_rows_M
            logits_BV[restricted_M] = logits_BV[restricted_M] - torch.inf
            logits_BV[places] = allowed_N
        if adjustments.bitmask_BW is not None:
            forbidden_BV = ~unpack_bitmask(adjustments.bitmask_BW, logits_BV.shape[1])
            logits_BV.copy_(torch.where(forbidden_BV, logits_BV - torch.inf, logits_BV))

    def weigh(self, logits_BV: torch.Tensor, rows: SamplingRows) -> TokenWeights:
        """See the contract."""
        weights_BV = torch.empty(logits_BV.shape, dtype=torch.int64, device=logits_BV.device)
        status_B = torch.empty(logits_BV.shape[:1], dtype=torch.int32, device=logits_BV.device)
        sums_B = torch.empty(logits_BV.shape[:1], dtype=torch.int64, device=logits_BV.device)
        for start, stop in _pieces(logits_BV):
            piece = _weigh(logits_BV[start:stop], rows.slice(start, stop))
            weights_BV[start:stop] = piece.weights_BV
            sums_B[start:stop] = piece.sums_B
            status_B[start:stop] = piece.status_B
        return TokenWeights(weights_BV, sums_B, status_B)

    def uniforms(self, seeds_B: torch.Tensor, streams_B: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        return uniform_53(seeds_B, streams_B)

    def draw(self, weights: TokenWeights, uniforms_B: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        token_ids_B = torch.empty_like(weights.sums_B)
        for start, stop in _pieces(weights.weights_BV):
            piece = TokenWeights(
                weights.weights_BV[start:stop], weights.sums_B[start:stop], weights.status_B[start:stop]
            )
            token_ids_B[start:stop] = _draw(piece, uniforms_B[start:stop])
        return token_ids_B

    def sample(self, logits_BV: torch.Tensor, rows: SamplingRows) -> SampledTokens:
        """See the contract."""
        token_ids_B = torch.empty_like(rows.seeds_B)
        status_B = torch.empty(logits_BV.shape[:1], dtype=torch.int32, device=logits_BV.device)
        # Without a positive temperature all mass lies on one token, whatever the filters and the draw.
        is_drawn = rows.facts.has_drawn or logits_BV.shape[1] == 0
        uniforms_B = self.uniforms(rows.seeds_B, rows.streams_B) if is_drawn else None
        for start, stop in _pieces(logits_BV):
            x_BV = logits_BV[start:stop]
            if uniforms_B is not None:
                weights = _weigh(x_BV, rows.slice(start, stop))
                status_B[start:stop] = weights.status_B
                token_ids_B[start:stop] = _draw(weights, uniforms_B[start:stop])
            else:
                status_B[start:stop] = _status(x_BV)
                token_ids_B[start:stop] = torch.where(status_B[start:stop] == RowStatus.OK, _lowest_best(x_BV), -1)
        if rows.facts.has_forced:
            forced_B = (rows.forced_ids_B >= 0) & (status_B == RowStatus.OK)
            token_ids_B = torch.where(forced_B, rows.forced_ids_B, token_ids_B)
        return SampledTokens(token_ids_B, status_B)

    def log_probabilities(
        self, logits_BV: torch.Tensor, rows: SamplingRows, token_ids_B: torch.Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """See the contract."""
        found = []
        for start, stop in _pieces(logits_BV):
            x_BV, settings = logits_BV[start:stop], rows.slice(start, stop)
            weights = _weigh(x_BV, settings)
            has_mass_BV = weights.weights_BV > 0
            candidates = _Candidates(
                kept_BV=torch.where(_is_filtered(settings, x_BV.shape[1])[:, None], has_mass_BV, x_BV > -torch.inf),
                listed_BV=has_mass_BV,
                keys_BV=_keys(weights.weights_BV),
                usable_B=weights.status_B == RowStatus.OK,
            )
            temperature_B = torch.where(settings.temperature_B == 0, 1.0, settings.temperature_B)
            found.append(_log_probabilities(x_BV, temperature_B, candidates, token_ids_B[start:stop], top_count))
        return _join(found, token_ids_B, top_count)

    def raw_log_probabilities(
        self, logits_TV: torch.Tensor, token_ids_T: torch.Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """See the contract."""
        found = []
        for start, stop in _pieces(logits_TV):
            x_TV = logits_TV[start:stop]
            kept_TV = x_TV > -torch.inf
            candidates = _Candidates(
                kept_BV=kept_TV,
                listed_BV=kept_TV,
                keys_BV=_logit_keys(x_TV),
                usable_B=_status(x_TV) == RowStatus.OK,
            )
            temperature_T = torch.ones(x_TV.shape[:1], dtype=torch.float64, device=x_TV.device)
            found.append(_log_probabilities(x_TV, temperature_T, candidates, token_ids_T[start:stop], top_count))
        return _join(found, token_ids_T, top_count)


class CpuRefSampling(ReadableSampling):
    """The readable ops, by quicker ways with the same bits where `QuickSampling` has one."""

    def __init__(self) -> None:
        self._quick = QuickSampling(ReadableSampling())

    def sample(self, logits_BV: torch.Tensor, rows: SamplingRows) -> SampledTokens:
        """See the contract."""
        if self._quick.can_serve(logits_BV):
            return self._quick.sample(logits_BV, rows)
        return super().sample(logits_BV, rows)

    def log_probabilities(
        self, logits_BV: torch.Tensor, rows: SamplingRows, token_ids_B: torch.Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """See the contract."""
        if self._quick.can_serve(logits_BV):
            return self._quick.log_probabilities(logits_BV, rows, token_ids_B, top_count)
        return super().log_probabilities(logits_BV, rows, token_ids_B, top_count)


def unpack_bitmask(bitmask_BW: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the bits of an int32 [B, W] mask as bool [B, vocabulary], the lowest bit of a word first."""
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=bitmask_BW.device)
    bits = (bitmask_BW[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocabulary].bool()


def _pieces(matrix: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield row ranges whose float64 copies stay in a core's cache."""
    rows, width = matrix.shape
    step = max(1, _PIECE_ELEMENTS // max(1, width))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _status(x_BV: torch.Tensor) -> torch.Tensor:
    if x_BV.shape[1] == 0:
        return x_BV.new_full(x_BV.shape[:1], RowStatus.EMPTY, dtype=torch.int32)
    # The maximum is NaN if any element is, so one reduction tells all three cases apart.
    largest_B = x_BV.amax(-1)
    broken_B = largest_B.isnan() | (largest_B == torch.inf)
    status_B = torch.where(largest_B == -torch.inf, int(RowStatus.EMPTY), int(RowStatus.OK))
    return torch.where(broken_B, int(RowStatus.NAN), status_B).to(torch.int32)


def _exponentials(x_BV: torch.Tensor, temperature_B: torch.Tensor, bits: int) -> torch.Tensor:
    """Return ``floor(exp((x - max) / T) * 2**bits)`` as int64; rows that are not OK hold anything."""
    scaled_BV = x_BV.to(torch.float64)
    scaled_BV.sub_(scaled_BV.amax(-1, keepdim=True))
    scaled_BV.div_(temperature_B[:, None])
    return scaled_BV.exp_().mul_(2.0**bits).to(torch.int64)


def _weigh(x_BV: torch.Tensor, rows: SamplingRows) -> TokenWeights:
    status_B = _status(x_BV)
    if x_BV.shape[1] == 0:
        return TokenWeights(torch.zeros_like(x_BV, dtype=torch.int64), torch.zeros_like(rows.seeds_B), status_B)
    usable_B = status_B == RowStatus.OK
    greedy_B = rows.temperature_B == 0
    weights_BV = _exponentials(x_BV, torch.where(greedy_B, 1.0, rows.temperature_B), WEIGHT_BITS)
    if rows.facts.has_greedy:
        ids_V = torch.arange(x_BV.shape[1], device=x_BV.device)
        point_BV = torch.where(ids_V == _lowest_best(x_BV)[:, None], 2**WEIGHT_BITS, 0)
        weights_BV = torch.where(greedy_B[:, None], point_BV, weights_BV)
    weights_BV.masked_fill_(~usable_B[:, None], 0)
    if rows.facts.has_top_k or rows.facts.has_top_p:
        keys_BV = _keys(weights_BV)
        weights_BV.masked_fill_(keys_BV < _least_kept_key(keys_BV, weights_BV, rows)[:, None], 0)
    if rows.facts.has_min_p:
        weights_BV.masked_fill_(weights_BV < rows.min_weight_B[:, None], 0)
    return TokenWeights(weights_BV, weights_BV.sum(-1), status_B)


def _lowest_best(x_BV: torch.Tensor) -> torch.Tensor:
    """Return each row's lowest id among the largest logits; the width itself where the row holds NaN."""
    ids_V = torch.arange(x_BV.shape[1], device=x_BV.device)
    return torch.where(x_BV == x_BV.amax(-1, keepdim=True), ids_V, x_BV.shape[1]).amin(-1)


def _keys(weights_BV: torch.Tensor) -> torch.Tensor:
    """Return unique int64 keys whose descending order is (weight descending, id ascending)."""
    ids_V = torch.arange(weights_BV.shape[1], device=weights_BV.device)
    return weights_BV.bitwise_left_shift(_ID_BITS).bitwise_or_(_LARGEST_ID - ids_V)


def _logit_keys(x_BV: torch.Tensor) -> torch.Tensor:
    """Return unique int64 keys whose descending order is (logit descending, id ascending)."""
    ids_V = torch.arange(x_BV.shape[1], device=x_BV.device)
    # Adding 0 turns -0 into +0. A negative float's bits fall as its value rises: flip all but the sign.
    bits_BV = (x_BV + 0.0).view(torch.int32)
    ordered_BV = torch.where(bits_BV < 0, bits_BV ^ _LARGEST_ID, bits_BV)
    return ordered_BV.to(torch.int64).bitwise_left_shift_(_ID_BITS).bitwise_or_(_LARGEST_ID - ids_V)


def _least_kept_key(keys_BV: torch.Tensor, weights_BV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return each row's least key that top-k and then top-p keep."""
    width = keys_BV.shape[1]
    facts = rows.facts
    needed = width if facts.has_top_p and not facts.bounded_by_top_k else min(facts.largest_top_k, width)
    if needed < width:
        order_BK = keys_BV.topk(max(1, needed), dim=-1).values
    else:
        order_BK = keys_BV.sort(dim=-1, descending=True).values
    sorted_BK = order_BK >> _ID_BITS
    filtered_B = (rows.top_k_B > 0) & (rows.top_k_B < width)
    cut_B = torch.where(filtered_B, rows.top_k_B, width)
    places_K = torch.arange(order_BK.shape[1], device=keys_BV.device)
    within_BK = places_K < cut_B[:, None]
    before_BK = sorted_BK.cumsum(-1) - sorted_BK
    left_by_k_B = torch.where(filtered_B, (sorted_BK * within_BK).sum(-1), weights_BV.sum(-1))
    limit_B = (rows.top_p_B * left_by_k_B).floor().to(torch.int64)
    kept_BK = within_BK & ((before_BK <= limit_B[:, None]) | (rows.top_p_B >= 1)[:, None])
    last_B = kept_BK.sum(-1).clamp(min=1) - 1
    least_B = order_BK.gather(1, last_B[:, None])[:, 0]
    return torch.where(filtered_B | (rows.top_p_B < 1), least_B, 0)


def _draw(weights: TokenWeights, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative sum in two levels: the block, then the token within it."""
    rows, width = weights.weights_BV.shape
    if rows == 0 or width == 0:
        return torch.full_like(weights.sums_B, -1)
    target_B = torch.minimum((uniforms_B * weights.sums_B).floor().to(torch.int64), weights.sums_B - 1)
    block = min(_DRAW_BLOCK, width)
    padded_BV = torch.nn.functional.pad(weights.weights_BV, (0, -width % block))
    blocks_BNC = padded_BV.view(rows, -1, block)
    through_BN = blocks_BNC.sum(-1).cumsum(-1)
    block_B1 = (through_BN <= target_B[:, None]).sum(-1, keepdim=True).clamp(max=through_BN.shape[1] - 1)
    block_BC = blocks_BNC.gather(1, block_B1[:, :, None].expand(-1, -1, block))[:, 0]
    before_B1 = through_BN.gather(1, block_B1) - block_BC.sum(-1, keepdim=True)
    inside_B = (block_BC.cumsum(-1) + before_B1 <= target_B[:, None]).sum(-1)
    token_ids_B = block_B1[:, 0] * block + inside_B
    return torch.where(weights.status_B == RowStatus.OK, token_ids_B, -1)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Which tokens take part in a log-probability: in the sum, in the list, in which order."""

    kept_BV: torch.Tensor
    listed_BV: torch.Tensor
    keys_BV: torch.Tensor
    usable_B: torch.Tensor


def _is_filtered(rows: SamplingRows, width: int) -> torch.Tensor:
    """Return bool [B]: a filter is in force, so that tokens of weight 0 are out."""
    by_top_k_B = (rows.top_k_B > 0) & (rows.top_k_B < width)
    return by_top_k_B | (rows.top_p_B < 1) | (rows.min_weight_B > 0) | (rows.temperature_B == 0)


def _log_probabilities(
    x_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    candidates: _Candidates,
    token_ids_B: torch.Tensor,
    top_count: int,
) -> TokenLogProbabilities:
    rows, width = x_BV.shape
    chosen_B = x_BV.new_full((rows,), NO_MASS)
    top_ids_BN = token_ids_B.new_full((rows, top_count), -1)
    top_values_BN = x_BV.new_full((rows, top_count), NO_MASS)
    if width == 0:
        return TokenLogProbabilities(chosen_B, top_ids_BN, top_values_BN)
    units_BV = _exponentials(x_BV, temperature_B, NORMALISER_BITS)
    total_B = torch.where(candidates.kept_BV, units_BV, 0).sum(-1)
    log_total_B1 = (total_B.to(torch.float64) * 2.0**-NORMALISER_BITS).log()[:, None]
    largest_B1 = x_BV.amax(-1, keepdim=True).to(torch.float64)

    def values(ids_BN: torch.Tensor, present_BV: torch.Tensor) -> torch.Tensor:
        places_BN = ids_BN.clamp(min=0)
        scaled_BN = (x_BV.gather(1, places_BN).to(torch.float64) - largest_B1) / temperature_B[:, None]
        present_BN = present_BV.gather(1, places_BN) & (ids_BN >= 0) & candidates.usable_B[:, None]
        return torch.where(present_BN, (scaled_BN - log_total_B1).to(torch.float32).clamp(min=NO_MASS), NO_MASS)

    chosen_B = values(token_ids_B[:, None], candidates.kept_BV)[:, 0]
    listed = min(top_count, width)
    if listed:
        best_BN = candidates.keys_BV.topk(listed, dim=-1).values
        ids_BN = _LARGEST_ID - (best_BN & _LARGEST_ID)
        has_value_BN = candidates.listed_BV.gather(1, ids_BN) & candidates.usable_B[:, None]
        top_values_BN[:, :listed] = values(ids_BN, candidates.listed_BV)
        top_ids_BN[:, :listed] = torch.where(has_value_BN, ids_BN, -1)
    return TokenLogProbabilities(chosen_B, top_ids_BN, top_values_BN)


def _join(pieces: list[TokenLogProbabilities], token_ids_B: torch.Tensor, top_count: int) -> TokenLogProbabilities:
    if not pieces:
        none_BN = token_ids_B.new_full((0, top_count), -1)
        return TokenLogProbabilities(none_BN.new_zeros(0, dtype=torch.float32), none_BN, none_BN.to(torch.float32))
    return TokenLogProbabilities(
        chosen_B=torch.cat([piece.chosen_B for piece in pieces]),
        top_ids_BN=torch.cat([piece.top_ids_BN for piece in pieces]),
        top_values_BN=torch.cat([piece.top_values_BN for piece in pieces]),
    )
