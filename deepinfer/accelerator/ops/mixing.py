"""Hyper-connection mixing of the residual streams (model.md section 3).

Legend: T rows, S streams, D hidden size, M = (2 + S) * S mixing outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op


@dataclass(frozen=True, slots=True)
class Mix:
    """Coefficients of one sublayer, float32 (float64 when the activations are).

    Attributes:
        pre_TS: weights with which the *next* collapse reads the streams.
        post_TS: weights with which the sublayer's output enters each stream.
        comb_TSS: doubly stochastic mixing; the first S index is the source stream, the second the target.
    """

    pre_TS: torch.Tensor
    post_TS: torch.Tensor
    comb_TSS: torch.Tensor


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Parameters of one sublayer's mix, float32: fn [M, S*D] (input index = stream * D + d), base [M], scale [3]."""

    fn_MK: torch.Tensor
    base_M: torch.Tensor
    scale_3: torch.Tensor


class MixingOps(OpGroup):
    """Sinkhorn-normalised stream mixing."""

    group = "mixing"

    @op
    def mixes(
        self, streams_TSD: torch.Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float
    ) -> Mix:
        """Compute the coefficients of one sublayer from the streams.

        ``m = (x @ fn^T) * rsqrt(mean(x^2) + norm_eps)`` with one statistic over all S*D values, in float32;
        ``pre = sigmoid(m[:S]*scale[0] + base[:S]) + mix_eps``; ``post = 2*sigmoid(m[S:2S]*scale[1] + base[S:2S])``;
        ``c = softmax over the target index of (m[2S:].view(S,S)*scale[2] + base) + mix_eps``, then columns (first
        index) are divided by ``sum + mix_eps``; then ``iterations - 1`` times rows, then columns. R2.
        """
        not_implemented(self, "mixes")

    @op
    def collapse(self, streams_TSD: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
        """Return ``sum_i pre[i] * streams[i]`` [T, D], streams in ascending order, float32, rounded once."""
        not_implemented(self, "collapse")

    @op
    def post(self, output_TD: torch.Tensor, streams_TSD: torch.Tensor, mix: Mix) -> torch.Tensor:
        """Return new streams ``out[j] = post[j]*output + sum_i comb[i,j]*streams[i]`` in float32, rounded once."""
        not_implemented(self, "post")
