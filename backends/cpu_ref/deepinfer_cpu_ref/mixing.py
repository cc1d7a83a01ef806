"""Hyper-connection mixing of the residual streams.

Sums over the few streams are written as additions in ascending order, so that no reduction kernel chooses their order.

Legend: T rows, S streams, D hidden size, M = (2 + S) * S mixing outputs, K = S * D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.ops.mixing import Mix, MixingOps, MixWeights
from deepinfer_cpu_ref.computation import Computed, refuse, require_float, wide_dtype
from deepinfer_cpu_ref.invariant import mean_square, pad_width, padded_product, sigmoid, sum_in_order


class CpuRefMixing(Computed, MixingOps):
    """Sinkhorn-normalised mixing in at least float32."""

    def mixes(self, streams_TSD: Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float) -> Mix:
        """See :meth:`MixingOps.mixes`."""
        require_float("mixing.mixes", "streams", streams_TSD)
        streams = streams_TSD.shape[1]
        outputs = (2 + streams) * streams
        if tuple(weights.fn_MK.shape) != (outputs, streams * streams_TSD.shape[2]) or iterations < 1:
            refuse(
                "mixing.mixes",
                f"streams {tuple(streams_TSD.shape)} need fn {(outputs, streams * streams_TSD.shape[2])} and at least "
                f"one iteration; got fn {tuple(weights.fn_MK.shape)} and {iterations} iterations",
            )
        wide = wide_dtype(streams_TSD)
        x_TK = streams_TSD.flatten(1).to(wide)
        mixed_TM = self._product(x_TK, weights.fn_MK.to(wide)) * torch.rsqrt(mean_square(x_TK) + norm_eps)
        base_M, scale_3 = weights.base_M.to(wide), weights.scale_3.to(wide)
        sizes = [streams, streams, streams * streams]
        pre, post, comb = torch.split(mixed_TM, sizes, dim=1)
        base_pre, base_post, base_comb = torch.split(base_M, sizes)
        comb_TSS = torch.unflatten(comb * scale_3[2] + base_comb, 1, (streams, streams))
        return Mix(
            pre_TS=sigmoid(pre * scale_3[0] + base_pre) + mix_eps,
            post_TS=sigmoid(post * scale_3[1] + base_post) * 2.0,
            comb_TSS=_doubly_stochastic(comb_TSS, iterations, mix_eps),
        )

    def collapse(self, streams_TSD: Tensor, pre_TS: Tensor) -> Tensor:
        """See :meth:`MixingOps.collapse`."""
        wide = wide_dtype(streams_TSD)
        pre_TS = pre_TS.to(wide)
        terms = (pre_TS[:, stream, None] * streams_TSD[:, stream].to(wide) for stream in range(streams_TSD.shape[1]))
        return sum_in_order(terms).to(streams_TSD.dtype)

    def post(self, output_TD: Tensor, streams_TSD: Tensor, mix: Mix) -> Tensor:
        """See :meth:`MixingOps.post`."""
        wide = wide_dtype(streams_TSD)
        comb_TSS, post_TS = mix.comb_TSS.to(wide), mix.post_TS.to(wide)
        mixed_TSD = sum_in_order(
            comb_TSS[:, source, :, None] * streams_TSD[:, source, None, :].to(wide)
            for source in range(streams_TSD.shape[1])
        )
        return (post_TS[:, :, None] * output_TD[:, None, :].to(wide) + mixed_TSD).to(streams_TSD.dtype)

    def _product(self, x_TK: Tensor, fn_MK: Tensor) -> Tensor:
        if self.computation.invariant:
            return padded_product(x_TK, pad_width(fn_MK), fn_MK.shape[0])
        return torch.nn.functional.linear(x_TK, fn_MK)


def _doubly_stochastic(logits_TSS: Tensor, iterations: int, eps: float) -> Tensor:
    exponentials = torch.exp(logits_TSS - logits_TSS.amax(-1, keepdim=True))
    comb_TSS = exponentials / _sum_over_targets(exponentials) + eps
    comb_TSS = comb_TSS / (_sum_over_sources(comb_TSS) + eps)
    for _ in range(iterations - 1):
        comb_TSS = comb_TSS / (_sum_over_targets(comb_TSS) + eps)
        comb_TSS = comb_TSS / (_sum_over_sources(comb_TSS) + eps)
    return comb_TSS


def _sum_over_targets(comb_TSS: Tensor) -> Tensor:
    return sum_in_order(torch.split(comb_TSS, 1, dim=2))


def _sum_over_sources(comb_TSS: Tensor) -> Tensor:
    return sum_in_order(torch.split(comb_TSS, 1, dim=1))
