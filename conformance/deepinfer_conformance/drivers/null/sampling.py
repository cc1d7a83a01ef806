"""Sampling of the null driver: token 0 for certain, unless a token is forced.

Legend: B sampled rows, V vocabulary, N listed tokens, T rows of a prompt.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.ops.sampling import (
    NO_MASS,
    WEIGHT_BITS,
    LogitAdjustments,
    RowStatus,
    SampledTokens,
    SamplingOps,
    SamplingRows,
    TokenLogProbabilities,
    TokenWeights,
)
from deepinfer_conformance.drivers.host import OptionedGroup


class NullSampling(OptionedGroup, SamplingOps):
    """All the mass lies on token 0; masks, filters and seeds are not looked at, forced tokens are."""

    def adjust(self, logits_BV: torch.Tensor, adjustments: LogitAdjustments) -> None:
        """Change nothing."""

    def weigh(self, logits_BV: torch.Tensor, rows: SamplingRows) -> TokenWeights:
        """Give token 0 the largest weight and every other token none."""
        del rows
        weights_BV = logits_BV.new_zeros(logits_BV.shape, dtype=torch.int64)
        weights_BV[:, :1] = 1 << WEIGHT_BITS
        return TokenWeights(
            weights_BV=weights_BV,
            sums_B=weights_BV.new_full((weights_BV.shape[0],), 1 << WEIGHT_BITS),
            status_B=_ok(logits_BV),
        )

    def uniforms(self, seeds_B: torch.Tensor, streams_B: torch.Tensor) -> torch.Tensor:
        """Return zeros [B]."""
        del streams_B
        return seeds_B.new_zeros(seeds_B.shape, dtype=torch.float64)

    def draw(self, weights: TokenWeights, uniforms_B: torch.Tensor) -> torch.Tensor:
        """Return token 0 for every row."""
        del uniforms_B
        return torch.zeros_like(weights.sums_B)

    def sample(self, logits_BV: torch.Tensor, rows: SamplingRows) -> SampledTokens:
        """Return token 0, or the forced token where there is one."""
        return SampledTokens(token_ids_B=rows.forced_ids_B.clamp(min=0), status_B=_ok(logits_BV))

    def log_probabilities(
        self, logits_BV: torch.Tensor, rows: SamplingRows, token_ids_B: torch.Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """Return log 1 for the chosen token and for token 0, the only one that is listed."""
        del logits_BV, rows
        return _certain(token_ids_B, top_count)

    def raw_log_probabilities(
        self, logits_TV: torch.Tensor, token_ids_T: torch.Tensor, top_count: int
    ) -> TokenLogProbabilities:
        """Return log 1 for the chosen token and for token 0, the only one that is listed."""
        del logits_TV
        return _certain(token_ids_T, top_count)


def _ok(logits_BV: torch.Tensor) -> torch.Tensor:
    return logits_BV.new_full((logits_BV.shape[0],), int(RowStatus.OK), dtype=torch.int32)


def _certain(token_ids_B: torch.Tensor, top_count: int) -> TokenLogProbabilities:
    rows = token_ids_B.shape[0]
    top_ids_BN = token_ids_B.new_full((rows, top_count), -1)
    top_values_BN = token_ids_B.new_full((rows, top_count), NO_MASS, dtype=torch.float32)
    top_ids_BN[:, :1] = 0
    top_values_BN[:, :1] = 0.0
    return TokenLogProbabilities(token_ids_B.new_zeros((rows,), dtype=torch.float32), top_ids_BN, top_values_BN)
