"""The sampling ops by quick ways that are exact, beside the readable ones and held to their bits.

Each row goes the shortest way that can serve it: most rows shrink to the few blocks of tokens that can matter and are
then sampled by the readable ops themselves; rows in which nearly all tokens matter are read whole
(`deepinfer_cpu_ref.quick_dense`); what neither can decide goes to the readable ops as it is. A row's result is exact on
every way, so it cannot depend on which way it went, nor on its neighbours.

Legend: B sampled rows, R rows of a group, V vocabulary, N blocks of a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch

from deepinfer.accelerator.ops.sampling import (
    NORMALISER_BITS,
    WEIGHT_BITS,
    RowStatus,
    SampledTokens,
    SamplingOps,
    SamplingRows,
    TokenLogProbabilities,
    TokenWeights,
)
from deepinfer_cpu_ref.quick_blocks import BlockedRows, DrawnRows, NarrowRows, kept_blocks
from deepinfer_cpu_ref.quick_cut import UNDECIDED, keep_by_top_p
from deepinfer_cpu_ref.quick_dense import WIDEST_VOCABULARY, draw_dense
from deepinfer_cpu_ref.quick_scratch import Scratch

_FINE_BLOCK = 8


class QuickSampling:
    """Ways through the sampling ops that give the bits of ``readable``.

    Args:
        readable: the ops that define the result; they are asked for what is small or cannot be decided quickly.
        block: tokens of a block.
        least_vocabulary: narrower rows are left to the readable ops.
    """

    def __init__(self, readable: SamplingOps, *, block: int = 64, least_vocabulary: int = 4096) -> None:
        self._readable = readable
        self._block = block
        self._least_vocabulary = least_vocabulary
        self._scratch = Scratch()

    def can_serve(self, logits_BV: torch.Tensor) -> bool:
        """Say whether these logits are of the kind that the quick ways are exact for, and worth them."""
        rows, vocabulary = logits_BV.shape
        return (
            rows > 0
            and max(1, self._least_vocabulary) <= vocabulary <= WIDEST_VOCABULARY
            and logits_BV.device.type == "cpu"
            and logits_BV.dtype == torch.float32
            and logits_BV.stride(1) == 1
        )

    def sample(self, logits_BV: torch.Tensor, rows: SamplingRows) -> SampledTokens:
        """Do what :meth:`SamplingOps.sample` promises; `can_serve` must have agreed."""
        blocked = BlockedRows.of(logits_BV, self._block)
        status_B = _status(blocked.largest_B)
        usable_B = status_B == RowStatus.OK
        tokens_B = torch.full_like(rows.seeds_B, -1)
        if rows.facts.has_greedy:
            # All mass lies on one token, whatever the filters and the draw.
            rows_R = (usable_B & (rows.temperature_B == 0)).nonzero()[:, 0]
            tokens_B[rows_R] = blocked.lowest_best(rows_R)
        if rows.facts.has_drawn:
            rows_R = (usable_B & (rows.temperature_B > 0)).nonzero()[:, 0]
            settings = rows.select(rows_R)
            uniforms_R = self._readable.uniforms(settings.seeds_B, settings.streams_B)
            tokens_B[rows_R] = self._draw(logits_BV, blocked, DrawnRows(rows_R, settings, uniforms_R))
        if rows.facts.has_forced:
            tokens_B = torch.where((rows.forced_ids_B >= 0) & usable_B, rows.forced_ids_B, tokens_B)
        return SampledTokens(tokens_B, status_B)

    def _draw(self, logits_BV: torch.Tensor, blocked: BlockedRows, drawn: DrawnRows) -> torch.Tensor:
        vocabulary = logits_BV.shape[1]
        tokens_R = torch.full_like(drawn.rows_R, UNDECIDED)
        bits_R = torch.full_like(drawn.rows_R, WEIGHT_BITS)
        kept_RN = kept_blocks(blocked.largest_BN[drawn.rows_R], drawn.settings, vocabulary, bits_R)
        wide = []
        for places_M, is_narrow in _groups(kept_RN):
            group = drawn.select(places_M)
            if is_narrow:
                narrow = NarrowRows.of(blocked.logits_BNC, group.rows_R, kept_RN[places_M])
                tokens_R[places_M] = self._draw_narrow(narrow, group, vocabulary)
            else:
                wide.append(places_M)
        if wide:
            places_M = torch.cat(wide).sort().values
            tokens_R[places_M] = draw_dense(blocked, drawn.select(places_M), vocabulary, self._scratch)
        left_M = (tokens_R == UNDECIDED).nonzero()[:, 0]
        if len(left_M):
            left = drawn.select(left_M)
            weights = self._readable.weigh(logits_BV[left.rows_R], left.settings)
            tokens_R[left_M] = self._readable.draw(weights, left.uniforms_R)
        return tokens_R

    def log_probabilities(
        self, logits_BV: torch.Tensor, rows: SamplingRows, token_ids_B: torch.Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """Do what :meth:`SamplingOps.log_probabilities` promises; `can_serve` must have agreed."""
        vocabulary = logits_BV.shape[1]
        blocked = BlockedRows.of(logits_BV, self._block)
        usable_B = _status(blocked.largest_B) == RowStatus.OK
        bits_B = torch.where(_is_filtered(rows, vocabulary), WEIGHT_BITS, NORMALISER_BITS)
        kept_BN = kept_blocks(blocked.largest_BN, rows, vocabulary, bits_B)
        # The chosen token has a value even where it weighs nothing.
        kept_BN[torch.arange(len(kept_BN)), token_ids_B.clamp(min=0) // self._block] = True
        kept_BN &= usable_B[:, None]
        found = TokenLogProbabilities(
            logits_BV.new_empty(len(logits_BV)),
            token_ids_B.new_empty(len(logits_BV), top_count),
            logits_BV.new_empty(len(logits_BV), top_count),
        )
        left = [(~usable_B).nonzero()[:, 0]]
        for rows_R, is_narrow in _groups(kept_BN):
            if is_narrow:
                narrow = NarrowRows.of(blocked.logits_BNC, rows_R, kept_BN[rows_R])
                settings = rows.select(rows_R)
                settings = replace(settings, top_k_B=narrow.top_k(settings, vocabulary))
                places_R = narrow.places(token_ids_B[rows_R])
                part = self._readable.log_probabilities(narrow.logits_RV, settings, places_R, top_count)
                _store(found, rows_R, replace(part, top_ids_BN=narrow.ids(part.top_ids_BN)))
            else:
                left.append(rows_R)
        rows_R = torch.cat(left)
        if len(rows_R):
            settings, token_ids_R = rows.select(rows_R), token_ids_B[rows_R]
            part = self._readable.log_probabilities(logits_BV[rows_R], settings, token_ids_R, top_count)
            _store(found, rows_R, part)
        return found

    def _draw_narrow(self, narrow: NarrowRows, drawn: DrawnRows, vocabulary: int) -> torch.Tensor:
        rows = replace(drawn.settings, top_k_B=narrow.top_k(drawn.settings, vocabulary))
        width = narrow.logits_RV.shape[1]
        # The same once more in small blocks: what is kept now costs far more for each token than what has gone.
        fine = BlockedRows.of(narrow.logits_RV, _FINE_BLOCK)
        kept_RN = kept_blocks(fine.largest_BN, rows, width, torch.full_like(rows.top_k_B, WEIGHT_BITS))
        finest = NarrowRows.of(fine.logits_BNC, torch.arange(len(kept_RN)), kept_RN)
        before_top_p = replace(
            rows,
            top_k_B=finest.top_k(rows, width),
            top_p_B=torch.ones_like(rows.top_p_B),
            min_weight_B=torch.zeros_like(rows.min_weight_B),
            facts=replace(rows.facts, has_top_p=False, has_min_p=False),
        )
        weights = self._readable.weigh(finest.logits_RV, before_top_p)
        if rows.facts.has_top_p:
            keep_by_top_p(weights.weights_BV, rows.top_p_B)
        if rows.facts.has_min_p:
            weights.weights_BV.masked_fill_(weights.weights_BV < rows.min_weight_B[:, None], 0)
        kept = TokenWeights(weights.weights_BV, weights.weights_BV.sum(-1), weights.status_B)
        places_R1 = self._readable.draw(kept, drawn.uniforms_R)[:, None]
        return narrow.ids(finest.ids(places_R1))[:, 0]


def _groups(kept_BN: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield rows that keep about the same number of blocks, and whether that is a minor part; rows without go out."""
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for row, count in enumerate(kept_BN.sum(-1).tolist()):
        if count:
            alike[count.bit_length()].append(row)
    for bits, members in sorted(alike.items()):
        yield torch.tensor(members), 2 ** (bits - 1) * 4 <= kept_BN.shape[1]


def _status(largest_B: torch.Tensor) -> torch.Tensor:
    broken_B = largest_B.isnan() | (largest_B == torch.inf)
    status_B = torch.where(largest_B == -torch.inf, int(RowStatus.EMPTY), int(RowStatus.OK))
    return torch.where(broken_B, int(RowStatus.NAN), status_B).to(torch.int32)


def _is_filtered(rows: SamplingRows, vocabulary: int) -> torch.Tensor:
    by_top_k_B = (rows.top_k_B > 0) & (rows.top_k_B < vocabulary)
    return by_top_k_B | (rows.top_p_B < 1) | (rows.min_weight_B > 0) | (rows.temperature_B == 0)


def _store(found: TokenLogProbabilities, rows_R: torch.Tensor, part: TokenLogProbabilities) -> None:
    found.chosen_B[rows_R] = part.chosen_B
    found.top_ids_BN[rows_R] = part.top_ids_BN
    found.top_values_BN[rows_R] = part.top_values_BN
