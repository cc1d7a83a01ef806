"""Constructions whose result for one row has the same bits in every batch (repeatability level R2).

Why they are needed, with torch on a CPU: a matrix product picks its kernel, and with it the order of its sums, by the
number of rows, and by the number of columns that one thread gets; `sigmoid`, `silu` and `softplus` round differently
in the body and in the tail of a vector, so that the place of a value in memory matters; sums depend on strides and,
when very wide, on the number of threads; `topk` orders equal values as it likes. What is built here from `exp`,
`log1p`, division, contiguous sums and padded products does none of that. `determinism.py` tries it on the machine.

Functions that cost nothing keep R2 always; products only when asked, because a padded product of one row costs more.
`addcmul` and `add(alpha=...)` are avoided everywhere: fused and unfused bodies would round differently.

Legend: T rows, K in features, N out features, n competitors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_MULTIPLE = 8
"""Rows of a product are padded to a multiple of this."""

WIDTH_MULTIPLE = 128
"""Out features of a weight are padded to a multiple of this, once at load."""

WIDEST_SUM = 16_384
SUM_PIECE = 4_096
"""Rows wider than ``WIDEST_SUM`` are summed in pieces of this many values, then over the pieces."""

EXCLUDED_INT32 = -(2**31)
EXCLUDED_INT64 = -(2**63)


def sigmoid(x: Tensor) -> Tensor:
    """Return ``1 / (1 + exp(-x))``; exact 0 and 1 at the ends, NaN kept."""
    return (torch.exp(-x) + 1.0).reciprocal()


def silu(x: Tensor) -> Tensor:
    """Return ``x / (1 + exp(-x))``; NaN kept."""
    return x / (torch.exp(-x) + 1.0)


def softplus(x: Tensor) -> Tensor:
    """Return ``log(1 + exp(x))`` as ``log1p(exp(-|x|)) + max(x, 0)``, which neither overflows nor cancels; NaN kept."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0.0)


def row_sum(x: Tensor) -> Tensor:
    """Return the sum over the last dimension, which is kept with size 1."""
    x = x.contiguous()
    width = x.shape[-1]
    if width <= WIDEST_SUM:
        return x.sum(-1, keepdim=True)
    pieces = torch.unflatten(F.pad(x, (0, -width % SUM_PIECE)), -1, (-1, SUM_PIECE))
    return pieces.sum(-1).sum(-1, keepdim=True)


def mean_square(x: Tensor) -> Tensor:
    """Return the mean of squares over the last dimension, which is kept with size 1."""
    return row_sum(x * x) / x.shape[-1]


def sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    """Return ``((first + second) + third) + ...``: elementwise, in exactly the given order."""
    return reduce(torch.add, terms)


def pad_width(weight_NK: Tensor) -> Tensor:
    """Return the weight with zero rows up to a multiple of ``WIDTH_MULTIPLE`` out features."""
    missing = -weight_NK.shape[0] % WIDTH_MULTIPLE
    return F.pad(weight_NK, (0, 0, 0, missing)) if missing else weight_NK


def pad_rows(x_TK: Tensor) -> Tensor:
    """Return ``x`` contiguous, with zero rows up to a multiple of ``ROW_MULTIPLE``."""
    missing = -x_TK.shape[0] % ROW_MULTIPLE
    return F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK.contiguous()


def padded_product(x_TK: Tensor, padded_weight: Tensor, out_features: int) -> Tensor:
    """Return ``x @ W^T`` [T, out_features] with R2, for a weight that :func:`pad_width` made."""
    rows = x_TK.shape[0]
    if rows == 0:
        return x_TK.new_zeros((0, out_features))
    return F.linear(pad_rows(x_TK), padded_weight)[:rows, :out_features].contiguous()


def order_keys(scores: Tensor, competes: Tensor | None = None) -> Tensor:
    """Return integers that are ordered as the scores are: NaN below every number, -0 equal to +0.

    Args:
        scores: float32 or float64, any shape.
        competes: bool of the same shape; places where it is False get the excluded key, below every other.

    Returns:
        int32 keys for float32, int64 for float64.
    """
    integer, excluded = (
        (torch.int64, EXCLUDED_INT64) if scores.dtype == torch.float64 else (torch.int32, EXCLUDED_INT32)
    )
    bits = (scores + 0.0).contiguous().view(integer)
    keys = torch.where(bits < 0, bits ^ (-excluded - 1), bits)
    keys = keys.masked_fill(scores.isnan(), excluded + 1)
    return keys if competes is None else keys.masked_fill(~competes, excluded)


def excluded_key(keys: Tensor) -> int:
    """Return the key that never wins among keys of this dtype."""
    return EXCLUDED_INT64 if keys.dtype == torch.int64 else EXCLUDED_INT32


def best(keys: Tensor, count: int) -> Tensor:
    """Return the places of the ``count`` largest keys of each row: key descending, then place ascending.

    Args:
        keys: [..., n] as made by :func:`order_keys`.
        count: how many places are wanted.

    Returns:
        int64 [..., count], best first; -1 where fewer than ``count`` keys compete.
    """
    competitors = keys.shape[-1]
    kept = min(count, competitors)
    if keys.dtype == torch.int32:
        # Distinct by construction, so that the undefined order of topk among equals never comes up.
        places = torch.arange(competitors - 1, -1, -1, device=keys.device)
        order = ((keys.to(torch.int64) << 32) | places).topk(kept, dim=-1).indices
    else:
        order = keys.sort(dim=-1, descending=True, stable=True).indices[..., :kept]
    order = order.masked_fill(keys.gather(-1, order) == excluded_key(keys), -1)
    return F.pad(order, (0, count - kept), value=-1)


def ascending(places: Tensor) -> Tensor:
    """Return each row's places in ascending order, the missing ones (-1) last."""
    last = torch.iinfo(torch.int64).max
    ordered = places.masked_fill(places < 0, last).sort(dim=-1).values
    return ordered.masked_fill(ordered == last, -1)
