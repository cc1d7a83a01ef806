"""Hyper-connections: npu_mhc_pre, npu_mhc_sinkhorn and npu_mhc_post on a 950 with bfloat16 streams.

The operators' documented formulas are the contract's, eps by eps; their first residual index is the source stream,
like ours. Elsewhere, and with float32 streams, torch's own operators compute the same.

Legend: T rows, S streams, D hidden size, M = (2 + S) * S mixing outputs, K = S * D.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.accelerator.ops.mixing import Mix, MixingOps, MixWeights
from deepinfer_ascend.arithmetic import Arithmetic, refuse, sigmoid
from deepinfer_ascend.operators import Operators

OPERATOR_STREAMS: Final = 4


class NativeMixing(MixingOps):
    """Sinkhorn-normalised mixing in float32."""

    def __init__(self, arithmetic: Arithmetic, operators: Operators) -> None:
        self._arithmetic = arithmetic
        self._operators = operators

    def mixes(self, streams_TSD: Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float) -> Mix:
        """See :meth:`MixingOps.mixes`."""
        streams = streams_TSD.shape[1]
        needed = ((2 + streams) * streams, streams * streams_TSD.shape[2])
        if tuple(weights.fn_MK.shape) != needed or iterations < 1:
            refuse(
                "mixing.mixes",
                f"streams {tuple(streams_TSD.shape)} need fn {needed} and at least one iteration; got fn "
                f"{tuple(weights.fn_MK.shape)} and {iterations} iterations",
            )
        if self._uses_operators(streams_TSD):
            mix = self._operators.stream_mix(
                streams_TSD.contiguous(),
                weights.fn_MK,
                weights.scale_3,
                weights.base_M,
                norm_eps=norm_eps,
                mix_eps=mix_eps,
            )
            comb_TSS = self._operators.sinkhorn(mix.residual_TSS, iterations, mix_eps)
            return Mix(mix.pre_TS, mix.post_TS, comb_TSS)
        x_TK = streams_TSD.flatten(1).float()
        mean_T1 = (x_TK * x_TK).mean(dim=1, keepdim=True)
        mixed_TM = torch.nn.functional.linear(x_TK, weights.fn_MK) * torch.rsqrt(mean_T1 + norm_eps)
        pre, post, comb = torch.split(mixed_TM, [streams, streams, streams * streams], dim=1)
        base_pre, base_post, base_comb = torch.split(weights.base_M, [streams, streams, streams * streams])
        scale_3 = weights.scale_3
        comb_TSS = torch.unflatten(comb * scale_3[2] + base_comb, 1, (streams, streams))
        return Mix(
            pre_TS=sigmoid(pre * scale_3[0] + base_pre) + mix_eps,
            post_TS=sigmoid(post * scale_3[1] + base_post) * 2.0,
            comb_TSS=_doubly_stochastic(comb_TSS, iterations, mix_eps),
        )

    def collapse(self, streams_TSD: Tensor, pre_TS: Tensor) -> Tensor:
        """See :meth:`MixingOps.collapse`."""
        total_TD = pre_TS[:, 0, None] * streams_TSD[:, 0].float()
        for stream in range(1, streams_TSD.shape[1]):
            total_TD = total_TD + pre_TS[:, stream, None] * streams_TSD[:, stream].float()
        return total_TD.to(streams_TSD.dtype)

    def post(self, output_TD: Tensor, streams_TSD: Tensor, mix: Mix) -> Tensor:
        """See :meth:`MixingOps.post`."""
        if self._uses_operators(streams_TSD) and output_TD.dtype == streams_TSD.dtype:
            return self._operators.post_streams(
                streams_TSD.contiguous(), mix.comb_TSS.contiguous(), output_TD.contiguous(), mix.post_TS.contiguous()
            )
        mixed_TSD = mix.comb_TSS[:, 0, :, None] * streams_TSD[:, 0, None, :].float()
        for source in range(1, streams_TSD.shape[1]):
            mixed_TSD = mixed_TSD + mix.comb_TSS[:, source, :, None] * streams_TSD[:, source, None, :].float()
        return (mix.post_TS[:, :, None] * output_TD[:, None, :].float() + mixed_TSD).to(streams_TSD.dtype)

    def _uses_operators(self, streams_TSD: Tensor) -> bool:
        return (
            self._arithmetic.soc.has_hyper_connections
            and streams_TSD.dtype == torch.bfloat16
            and streams_TSD.shape[1] == OPERATOR_STREAMS
            and streams_TSD.shape[0] > 0
        )


def _doubly_stochastic(logits_TSS: Tensor, iterations: int, eps: float) -> Tensor:
    comb_TSS = torch.softmax(logits_TSS, dim=-1) + eps
    comb_TSS = comb_TSS / (comb_TSS.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb_TSS = comb_TSS / (comb_TSS.sum(-1, keepdim=True) + eps)
        comb_TSS = comb_TSS / (comb_TSS.sum(-2, keepdim=True) + eps)
    return comb_TSS
