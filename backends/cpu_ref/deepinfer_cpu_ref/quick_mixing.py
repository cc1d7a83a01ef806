"""Hyper-connection mixing in few calls: the coefficients in numpy, the streams in batched products.

A step of one row puts two 4 x 4 matrices a layer through forty normalisations each, and a call costs far more than its
arithmetic there. Numpy's calls are several times cheaper than torch's on such sizes, and with the rows last one call
serves every row of a large step too. For a single row even those are dear, and Python's own numbers are quicker.

Legend: T rows, S streams, D hidden size, M = (2 + S) * S mixing outputs, K = S * D.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer_cpu_ref.mixing import CpuRefMixing

Floats = npt.NDArray[np.float32]

_STREAMS = 4
"""So many streams the way of a single row is written for."""

_LARGEST_LOGIT = 500.0
"""Far inside of what ``math.exp`` takes without an error."""


class QuickMixing(CpuRefMixing):
    """The readable formulas with other kernels; what is not float32 goes to the readable ops."""

    def mixes(self, streams_TSD: Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float) -> Mix:
        """See :meth:`MixingOps.mixes`."""
        rows, streams, hidden = streams_TSD.shape
        fits = tuple(weights.fn_MK.shape) == ((2 + streams) * streams, streams * hidden) and iterations > 0
        if not fits or streams_TSD.dtype != torch.float32:
            return super().mixes(streams_TSD, weights, iterations, mix_eps, norm_eps)
        x_TK = streams_TSD.reshape(rows, streams * hidden)
        norm_T1 = torch.linalg.vector_norm(x_TK, dim=1, keepdim=True)
        mixed_TM = F.linear(x_TK, weights.fn_MK)
        if rows == 1 and streams == _STREAMS:
            factor = norm_T1.item() ** 2 / x_TK.shape[1] + norm_eps
            if factor > 0:
                mixed_M = mixed_TM.mul_(1.0 / math.sqrt(factor))[0].tolist()
                mix = mix_of_row(mixed_M, weights, streams, iterations, mix_eps)
                if mix is not None:
                    return mix
                mixed_TM = F.linear(x_TK, weights.fn_MK)
        return _mix_of_rows(mixed_TM.numpy(), norm_T1.numpy(), weights, streams, iterations, mix_eps, norm_eps)

    def collapse(self, streams_TSD: Tensor, pre_TS: Tensor) -> Tensor:
        """See :meth:`MixingOps.collapse`."""
        if streams_TSD.dtype != torch.float32 or pre_TS.dtype != torch.float32:
            return super().collapse(streams_TSD, pre_TS)
        return torch.bmm(pre_TS.unsqueeze(1), streams_TSD).squeeze(1)

    def post(self, output_TD: Tensor, streams_TSD: Tensor, mix: Mix) -> Tensor:
        """See :meth:`MixingOps.post`."""
        if not streams_TSD.dtype == output_TD.dtype == mix.comb_TSS.dtype == torch.float32:
            return super().post(output_TD, streams_TSD, mix)
        if len(output_TD) == 1:
            return torch.from_numpy(_post_of_row(output_TD.numpy(), streams_TSD[0].numpy(), mix))
        entering_TSD = mix.post_TS.unsqueeze(2) * output_TD.unsqueeze(1)
        return entering_TSD.baddbmm_(mix.comb_TSS.transpose(1, 2), streams_TSD)


@np.errstate(all="ignore")  # a row that is not finite stays so
def _post_of_row(output_1D: Floats, streams_SD: Floats, mix: Mix) -> Floats:
    """Return [1, S, D] on one thread: waking a second one costs more than all of it."""
    streams_after_SD: Floats = mix.comb_TSS[0].numpy().T.dot(streams_SD)
    streams_after_SD += mix.post_TS[0].numpy()[:, None] * output_1D
    return streams_after_SD[None]


@np.errstate(all="ignore")  # a row that is not finite stays so, and stays alone
def _mix_of_rows(
    mixed_TM: Floats,
    norm_T1: Floats,
    weights: MixWeights,
    streams: int,
    iterations: int,
    mix_eps: float,
    norm_eps: float,
) -> Mix:
    mixed_TM = mixed_TM / np.sqrt(norm_T1 * norm_T1 / np.float32(weights.fn_MK.shape[1]) + np.float32(norm_eps))
    scale_3 = weights.scale_3.numpy()
    mixed_TM = mixed_TM * np.repeat(scale_3, (streams, streams, streams * streams)) + weights.base_M.numpy()
    gates_TM = 1.0 / (1.0 + np.exp(-mixed_TM[:, : 2 * streams]))
    logits_SST = np.ascontiguousarray(mixed_TM[:, 2 * streams :].T).reshape(streams, streams, -1)
    comb_SST = doubly_stochastic(logits_SST, iterations, np.float32(mix_eps))
    return Mix(
        pre_TS=torch.from_numpy(gates_TM[:, :streams] + np.float32(mix_eps)),
        post_TS=torch.from_numpy(gates_TM[:, streams:] * np.float32(2.0)),
        comb_TSS=torch.from_numpy(np.ascontiguousarray(comb_SST.transpose(2, 0, 1))),
    )


def mix_of_row(mixed_M: list[float], weights: MixWeights, streams: int, iterations: int, mix_eps: float) -> Mix | None:
    """Return the mix of one row of four streams from its normalised products; None where a number is out of range.

    A normalisation only scales rows or columns, so that the matrix stays as it is and two lists of scales change.
    """
    scale_3, base_M = weights.scale_3.tolist(), weights.base_M.tolist()
    sizes = (streams, streams, streams * streams)
    scale_M = (scale for scale, size in zip(scale_3, sizes, strict=True) for _ in range(size))
    mixed_M = [value * scale + base for value, scale, base in zip(mixed_M, scale_M, base_M, strict=True)]
    # Also false for NaN.
    if not max(map(abs, mixed_M)) < _LARGEST_LOGIT or not sum(mixed_M) < math.inf or mix_eps <= 0:
        return None
    gates = [1.0 / (1.0 + math.exp(-value)) for value in mixed_M[: 2 * streams]]
    sources = [
        _softmax(mixed_M[start : start + streams], mix_eps) for start in range(2 * streams, len(mixed_M), streams)
    ]
    targets = list(zip(*sources, strict=True))
    by_source = [1.0] * streams
    by_target = [1.0 / (sum(column) + mix_eps) for column in targets]
    for _ in range(iterations - 1):
        # Written out: a loop over four costs several times what it does.
        to_0, to_1, to_2, to_3 = by_target
        by_source = [
            scale / (scale * (a * to_0 + b * to_1 + c * to_2 + d * to_3) + mix_eps)
            for scale, (a, b, c, d) in zip(by_source, sources, strict=True)
        ]
        from_0, from_1, from_2, from_3 = by_source
        by_target = [
            scale / (scale * (a * from_0 + b * from_1 + c * from_2 + d * from_3) + mix_eps)
            for scale, (a, b, c, d) in zip(by_target, targets, strict=True)
        ]
    comb = [
        [value * scale * other for value, other in zip(values, by_target, strict=True)]
        for scale, values in zip(by_source, sources, strict=True)
    ]
    return Mix(
        pre_TS=torch.tensor([[gate + mix_eps for gate in gates[:streams]]]),
        post_TS=torch.tensor([[2.0 * gate for gate in gates[streams:]]]),
        comb_TSS=torch.tensor([comb]),
    )


def _softmax(logits: list[float], eps: float) -> list[float]:
    largest = max(logits)
    powers = [math.exp(logit - largest) for logit in logits]
    total = sum(powers)
    return [power / total + eps for power in powers]


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
