"""Hyper-connections, batched and differentiable.

Legend: N rows (sequences times positions), S streams, D hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepinfer.model import ModelConfig

from .operators import inverse_rms
from .parameters import Weights


class Mix(NamedTuple):
    """The coefficients of one sublayer: pre [N, S], post [N, S], comb [N, source, target]."""

    pre_NS: Tensor
    post_NS: Tensor
    comb_NSS: Tensor


class _Balanced(torch.autograd.Function):
    """Sinkhorn's iteration; its gradient solves for the two scalings instead of walking back through every one.

    At the end of the iteration the matrix is a scaling of the exponentials, so that the gradient of the logits is
    ``P * (g - a - b)`` with ``a`` and ``b`` such that rows and columns of it vanish.
    """

    @staticmethod
    def forward(ctx: Any, logits_SSN: Tensor, iterations: int, eps: float) -> Tensor:
        comb = torch.softmax(logits_SSN, 1).add_(eps)
        comb.div_(comb.sum(0, keepdim=True).add_(eps))
        for _ in range(iterations - 1):
            comb.div_(comb.sum(1, keepdim=True).add_(eps))
            comb.div_(comb.sum(0, keepdim=True).add_(eps))
        ctx.save_for_backward(comb)
        ctx.iterations = iterations
        return comb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (comb,) = ctx.saved_tensors
        pulled = comb * grads[0]
        rows, columns = pulled.sum(1, keepdim=True), pulled.sum(0, keepdim=True)
        b = columns
        for _ in range(ctx.iterations):
            a = rows - (comb * b).sum(1, keepdim=True)
            b = columns - (comb * a).sum(0, keepdim=True)
        return pulled - comb * (a + b), None, None


def balanced(logits_SSN: Tensor, iterations: int, eps: float) -> Tensor:
    """Return the matrices [source, target, N] with rows and columns that sum to one."""
    found: Tensor = _Balanced.apply(logits_SSN, iterations, eps)  # type: ignore[no-untyped-call]
    return found


def mixes(streams_NSD: Tensor, weights: Weights, stem: str, config: ModelConfig) -> Mix:
    """Compute one sublayer's coefficients from the streams as they enter it."""
    streams, eps = config.hc_mult, config.hc_eps
    x_NK = streams_NSD.flatten(1)
    inverse_N1 = inverse_rms(x_NK, config.rms_norm_eps)
    sizes = [streams, streams, streams * streams]
    scale_M = torch.repeat_interleave(weights[f"{stem}_scale"], torch.tensor(sizes))
    mixed_NM = (x_NK @ weights[f"{stem}_fn"].T) * inverse_N1 * scale_M + weights[f"{stem}_base"]
    pre, post, comb = torch.split(mixed_NM, sizes, dim=1)
    comb_SSN = balanced(comb.T.contiguous().view(streams, streams, -1), config.hc_sinkhorn_iters, eps)
    return Mix(torch.sigmoid(pre) + eps, 2.0 * torch.sigmoid(post), comb_SSN.permute(2, 0, 1))


def collapse(streams_NSD: Tensor, pre_NS: Tensor) -> Tensor:
    """Return the weighted sum of the streams [N, D]."""
    return torch.bmm(pre_NS.unsqueeze(1), streams_NSD).squeeze(1)


def write_back(output_ND: Tensor, streams_NSD: Tensor, mix: Mix) -> Tensor:
    """Return the streams with a sublayer's output added."""
    # One product with the output as a further stream: many tiny products are dearer than their operands' copies.
    coefficients = torch.cat((mix.comb_NSS.transpose(1, 2), mix.post_NS.unsqueeze(2)), 2)
    return torch.bmm(coefficients, torch.cat((streams_NSD, output_ND.unsqueeze(1)), 1))
