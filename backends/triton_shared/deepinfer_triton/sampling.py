"""Op group ``sampling``: from logits to tokens, exactly repeatable.

Legend: B sampled rows, V vocabulary, T rows of a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.sampling import (
    NO_MASS,
    LogitAdjustments,
    RowStatus,
    SampledTokens,
    SamplingOps,
    SamplingRows,
    TokenLogProbabilities,
    TokenWeights,
)
from deepinfer_triton import logit_entries, token_draw
from deepinfer_triton.arithmetic import refuse, require_dtype
from deepinfer_triton.token_scores import token_scores
from deepinfer_triton.token_weights import (
    ChunkMaxima,
    ChunkWeights,
    chunk_maxima,
    filter_weights,
    unfiltered_weights,
)
from deepinfer_triton.weight_threshold import thresholds


class TritonSamplingOps(SamplingOps):
    """Rows are cut into chunks; whatever crosses a chunk is a maximum or a sum of integers."""

    def __init__(self, options: OpOptions) -> None:
        """Take the engine's options; no sampling op depends on them."""
        del options

    def adjust(self, logits_BV: Tensor, adjustments: LogitAdjustments) -> None:
        """See :meth:`SamplingOps.adjust`."""
        _require_logits("sampling.adjust", logits_BV)
        logit_entries.adjust(logits_BV, adjustments)

    def weigh(self, logits_BV: Tensor, rows: SamplingRows) -> TokenWeights:
        """See :meth:`SamplingOps.weigh`."""
        logits_BV = readable("sampling.weigh", logits_BV)
        if logits_BV.numel() == 0:
            sums_B = rows.seeds_B.new_zeros(logits_BV.shape[0])
            return TokenWeights(logits_BV.new_zeros(logits_BV.shape, dtype=torch.int64), sums_B, _empty(logits_BV))
        found = weighed(logits_BV, chunk_maxima(logits_BV), rows)
        return TokenWeights(found.weights_BV, found.sums_Bc.sum(-1), found.status_B)

    def uniforms(self, seeds_B: Tensor, streams_B: Tensor) -> Tensor:
        """See :meth:`SamplingOps.uniforms`."""
        require_dtype("sampling.uniforms", "seeds", seeds_B, torch.int64)
        require_dtype("sampling.uniforms", "streams", streams_B, torch.int64)
        return token_draw.uniforms(seeds_B, streams_B)

    def draw(self, weights: TokenWeights, uniforms_B: Tensor) -> Tensor:
        """See :meth:`SamplingOps.draw`."""
        weights_BV = weights.weights_BV
        if weights_BV.numel() == 0:
            return torch.full_like(weights.sums_B, -1)
        if weights_BV.stride(1) != 1 and weights_BV.shape[1] > 1:
            weights_BV = weights_BV.contiguous()
        return token_draw.draw(weights_BV, token_draw.chunk_sums(weights_BV), weights.status_B, uniforms_B, None)

    def sample(self, logits_BV: Tensor, rows: SamplingRows) -> SampledTokens:
        """See :meth:`SamplingOps.sample`."""
        logits_BV = readable("sampling.sample", logits_BV)
        if logits_BV.numel() == 0:
            return SampledTokens(rows.seeds_B.new_full(logits_BV.shape[:1], -1), _empty(logits_BV))
        forced_B = rows.forced_ids_B if rows.facts.has_forced else None
        maxima = chunk_maxima(logits_BV)
        if not rows.facts.has_drawn:
            # Without a positive temperature all mass lies on one token, whatever the filters and the draw.
            return SampledTokens(*token_draw.greedy(maxima, logits_BV.shape[1], forced_B))
        found = weighed(logits_BV, maxima, rows)
        uniforms_B = token_draw.uniforms(rows.seeds_B, rows.streams_B)
        return SampledTokens(token_draw.draw(*found, uniforms_B, forced_B), found.status_B)

    def log_probabilities(
        self, logits_BV: Tensor, rows: SamplingRows, token_ids_B: Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """See :meth:`SamplingOps.log_probabilities`."""
        logits_BV = readable("sampling.log_probabilities", logits_BV)
        if logits_BV.numel() == 0:
            return _no_scores(logits_BV, token_ids_B, top_count)
        maxima = chunk_maxima(logits_BV)
        weights_BV = weighed(logits_BV, maxima, rows).weights_BV
        return token_scores(logits_BV, maxima, token_ids_B, top_count, (weights_BV, rows))

    def raw_log_probabilities(self, logits_TV: Tensor, token_ids_T: Tensor, top_count: int) -> TokenLogProbabilities:
        """See :meth:`SamplingOps.raw_log_probabilities`."""
        logits_TV = readable("sampling.raw_log_probabilities", logits_TV)
        if logits_TV.numel() == 0:
            return _no_scores(logits_TV, token_ids_T, top_count)
        return token_scores(logits_TV, chunk_maxima(logits_TV), token_ids_T, top_count, None)


def weighed(logits_BV: Tensor, maxima: ChunkMaxima, rows: SamplingRows) -> ChunkWeights:
    """Return the row's weights after every filter that some row may have."""
    found = unfiltered_weights(logits_BV, maxima, rows.temperature_B)
    facts = rows.facts
    if facts.has_top_k or facts.has_top_p:
        filter_weights(found, *thresholds(found.weights_BV, rows), rows.min_weight_B)
    elif facts.has_min_p:
        nothing_B = torch.zeros_like(rows.min_weight_B)
        filter_weights(found, nothing_B, nothing_B, rows.min_weight_B)
    return found


def _require_logits(op_name: str, logits_BV: Tensor) -> None:
    require_dtype(op_name, "logits", logits_BV, torch.float32)
    if logits_BV.shape[1] > 1 and logits_BV.stride(1) != 1:
        refuse(op_name, f"logits have strides {logits_BV.stride()}; their rows must be consecutive")


def readable(op_name: str, logits_BV: Tensor) -> Tensor:
    """Return logits whose rows are consecutive."""
    require_dtype(op_name, "logits", logits_BV, torch.float32)
    return logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()


def _empty(logits_BV: Tensor) -> Tensor:
    return logits_BV.new_full(logits_BV.shape[:1], RowStatus.EMPTY, dtype=torch.int32)


def _no_scores(logits_BV: Tensor, token_ids_B: Tensor, top_count: int) -> TokenLogProbabilities:
    rows = logits_BV.shape[0]
    return TokenLogProbabilities(
        logits_BV.new_full((rows,), NO_MASS),
        token_ids_B.new_full((rows, top_count), -1),
        logits_BV.new_full((rows, top_count), NO_MASS),
    )
