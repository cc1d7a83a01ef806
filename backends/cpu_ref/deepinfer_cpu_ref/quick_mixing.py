"""Hyper-connection mixing in few calls: the coefficients in numpy, the streams in batched products.

A step of one row mixes sixteen times eight layers' worth of 4 x 4 matrices through forty normalisations each, and a
call costs far more than its arithmetic there. Numpy's calls are several times cheaper than torch's on such sizes, and
with the rows last one call serves every row of a large step too.

Legend: T rows, S streams, D hidden size, M = (2 + S) * S mixing outputs, K = S * D.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer_cpu_ref.mixing import CpuRefMixing

Floats = npt.NDArray[np.float32]


class QuickMixing(CpuRefMixing):
    """The readable formulas with other kernels; what is not float32 goes to the readable ops."""

    @np.errstate(all="ignore")  # a row that is not finite stays so, and stays alone
    def mixes(self, streams_TSD: Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float) -> Mix:
        """See :meth:`MixingOps.mixes`."""
        rows, streams, hidden = streams_TSD.shape
        fits = tuple(weights.fn_MK.shape) == ((2 + streams) * streams, streams * hidden) and iterations > 0
        if not fits or streams_TSD.dtype != torch.float32:
            return super().mixes(streams_TSD, weights, iterations, mix_eps, norm_eps)
        x_TK = streams_TSD.reshape(rows, streams * hidden)
        norm_T1 = torch.linalg.vector_norm(x_TK, dim=1, keepdim=True).numpy()
        mixed_TM = F.linear(x_TK, weights.fn_MK).numpy()
        mixed_TM = mixed_TM / np.sqrt(norm_T1 * norm_T1 / np.float32(x_TK.shape[1]) + np.float32(norm_eps))
        scale_3 = weights.scale_3.numpy()
        mixed_TM = mixed_TM * np.repeat(scale_3, (streams, streams, streams * streams)) + weights.base_M.numpy()
        gates_TM = 1.0 / (1.0 + np.exp(-mixed_TM[:, : 2 * streams]))
        logits_SST = np.ascontiguousarray(mixed_TM[:, 2 * streams :].T).reshape(streams, streams, rows)
        comb_SST = doubly_stochastic(logits_SST, iterations, np.float32(mix_eps))
        return Mix(
            pre_TS=torch.from_numpy(gates_TM[:, :streams] + np.float32(mix_eps)),
            post_TS=torch.from_numpy(gates_TM[:, streams:] * np.float32(2.0)),
            comb_TSS=torch.from_numpy(np.ascontiguousarray(comb_SST.transpose(2, 0, 1))),
        )

    def collapse(self, streams_TSD: Tensor, pre_TS: Tensor) -> Tensor:
        """See :meth:`MixingOps.collapse`."""
        if streams_TSD.dtype != torch.float32 or pre_TS.dtype != torch.float32:
            return super().collapse(streams_TSD, pre_TS)
        return torch.bmm(pre_TS.unsqueeze(1), streams_TSD).squeeze(1)

    def post(self, output_TD: Tensor, streams_TSD: Tensor, mix: Mix) -> Tensor:
        """See :meth:`MixingOps.post`."""
        if not streams_TSD.dtype == output_TD.dtype == mix.comb_TSS.dtype == torch.float32:
            return super().post(output_TD, streams_TSD, mix)
        entering_TSD = mix.post_TS.unsqueeze(2) * output_TD.unsqueeze(1)
        return entering_TSD.baddbmm_(mix.comb_TSS.transpose(1, 2), streams_TSD)


def doubly_stochastic(logits_SST: Floats, iterations: int, eps: np.float32) -> Floats:
    """Return the mixing matrices [source, target, row] by the additions and divisions of the readable form.

    An iteration that changes nothing would be repeated without effect, bit for bit, so it is the last one.
    """
    comb_SST: Floats = np.exp(logits_SST - logits_SST.max(1, keepdims=True))
    comb_SST /= _sum(comb_SST.transpose(1, 0, 2), np.empty_like(comb_SST[:, 0]))[:, None]
    comb_SST += eps
    total_ST = np.empty_like(comb_SST[0])
    by_source, by_target = list(comb_SST), list(comb_SST.transpose(1, 0, 2))
    before_SST = np.empty_like(comb_SST)
    _divide_by_sums(comb_SST, by_source, total_ST, total_ST[None], eps)
    for _ in range(iterations - 1):
        np.copyto(before_SST, comb_SST)
        _divide_by_sums(comb_SST, by_target, total_ST, total_ST[:, None], eps)
        _divide_by_sums(comb_SST, by_source, total_ST, total_ST[None], eps)
        if np.array_equal(before_SST, comb_SST):
            break
    return comb_SST


def _divide_by_sums(comb_SST: Floats, terms: list[Floats], total_ST: Floats, shaped: Floats, eps: np.float32) -> None:
    _sum(terms, total_ST)
    np.add(total_ST, eps, out=total_ST)
    np.divide(comb_SST, shaped, out=comb_SST)


def _sum(terms: list[Floats] | Floats, total_ST: Floats) -> Floats:
    np.copyto(total_ST, terms[0])
    for term in terms[1:]:
        np.add(total_ST, term, out=total_ST)
    return total_ST
