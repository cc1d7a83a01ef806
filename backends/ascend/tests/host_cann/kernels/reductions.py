"""Sums, extremes, orders and scans."""

# ruff: noqa: FBT001 (booleans stand where the operator has them)

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from host_cann.kernels.registry import KernelTable
from host_cann.views import store

TABLE = KernelTable()


def _dims(x: Tensor, dims: list[int]) -> list[int]:
    """Return the dimensions; none means all."""
    return dims or list(range(x.dim()))


@TABLE.add("aclnnReduceSum(self, ints dims, bool keep_dims, int dtype, out*)")
def total(self: Tensor, dims: list[int], keep_dims: bool, dtype: int, out: Tensor) -> None:
    store(out, self.sum(_dims(self, dims), keepdim=keep_dims, dtype=out.dtype))


@TABLE.add("aclnnMean(self, ints dims, bool keep_dims, int dtype, out*)")
def mean(self: Tensor, dims: list[int], keep_dims: bool, dtype: int, out: Tensor) -> None:
    store(out, self.mean(_dims(self, dims), keepdim=keep_dims, dtype=out.dtype))


TABLE.pure("aclnnMax(self, out*)", torch.max)
TABLE.pure("aclnnMin(self, out*)", torch.min)
TABLE.pure("aclnnProd(self, int dtype, out*)", lambda x, _: x.prod())
TABLE.pure(
    "aclnnProdDim(self, int dim, bool keep_dims, int dtype, out*)", lambda x, dim, keep, _: x.prod(dim, keepdim=keep)
)
TABLE.pure("aclnnMaxDim(self, int dim, bool keep_dims, values*, indices*)", torch.max)
TABLE.pure("aclnnMinDim(self, int dim, bool keep_dims, values*, indices*)", torch.min)
TABLE.pure("aclnnAmax(self, ints dims, bool keep_dims, out*)", torch.amax)
TABLE.pure("aclnnAmin(self, ints dims, bool keep_dims, out*)", torch.amin)
TABLE.pure("aclnnArgMax(self, int dim, bool keep_dims, out*)", torch.argmax)
TABLE.pure("aclnnArgMin(self, int dim, bool keep_dims, out*)", torch.argmin)
TABLE.pure("aclnnMedianDim(self, int dim, bool keep_dims, values*, indices*)", torch.median)
TABLE.pure("aclnnKthvalue(self, int k, int dim, bool keep_dims, values*, indices*)", torch.kthvalue)
TABLE.pure("aclnnLogSumExp(self, ints dims, bool keep_dims, out*)", torch.logsumexp)
TABLE.pure("aclnnSoftmax(self, int dim, out*)", torch.softmax)
TABLE.pure("aclnnLogSoftmax(self, int dim, out*)", torch.log_softmax)
TABLE.pure("aclnnCummax(self, int dim, values*, indices*)", torch.cummax)
TABLE.pure("aclnnCummin(self, int dim, values*, indices*)", torch.cummin)
TABLE.pure("aclnnEqual(self, other, out*)", lambda x, y: torch.tensor([torch.equal(x, y)]))


def _truth(reduce: Callable[..., Tensor]) -> Callable[[Tensor, list[int], bool], Tensor]:
    return lambda x, dims, keep: reduce(x, tuple(_dims(x, dims)), keepdim=keep)


TABLE.pure("aclnnAny(self, ints dims, bool keep_dims, out*)", _truth(torch.any))
TABLE.pure("aclnnAll(self, ints dims, bool keep_dims, out*)", _truth(torch.all))


@TABLE.add("aclnnLinalgVectorNorm(self, scalar order, ints dims, bool keep_dims, int dtype, out*)")
def vector_norm(self: Tensor, order: float, dims: list[int], keep_dims: bool, dtype: int, out: Tensor) -> None:
    store(out, torch.linalg.vector_norm(self, order, dims or None, keepdim=keep_dims, dtype=out.dtype))


def _spread(function: Callable[..., Tensor]) -> Callable[[Tensor, list[int], int, bool], Tensor]:
    return lambda x, dims, correction, keep: function(x, _dims(x, dims), correction=correction, keepdim=keep)


TABLE.pure("aclnnVarCorrection(self, ints dims, int correction, bool keep_dims, out*)", _spread(torch.var))
TABLE.pure("aclnnStd(self, ints dims, int correction, bool keep_dims, out*)", _spread(torch.std))


@TABLE.add("aclnnCumsum(self, int dim, int dtype, out*)")
def cumulative_sum(self: Tensor, dim: int, dtype: int, out: Tensor) -> None:
    store(out, self.cumsum(dim, dtype=out.dtype))


@TABLE.add("aclnnCumprod(self, scalar dim, int dtype, out*)")
def cumulative_product(self: Tensor, dim: int, dtype: int, out: Tensor) -> None:
    store(out, self.cumprod(dim, dtype=out.dtype))


def _order(x: Tensor, stable: bool, dim: int, descending: bool) -> tuple[Tensor, Tensor]:
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


TABLE.pure("aclnnSort(self, bool stable, int dim, bool descending, values*, indices*)", _order)


def _top(x: Tensor, k: int, dim: int, largest: bool, ordered: bool) -> tuple[Tensor, Tensor]:
    return torch.topk(x, k, dim, largest, ordered)


TABLE.pure("aclnnTopk(self, int k, int dim, bool largest, bool ordered, values*, indices*)", _top)
TABLE.pure(
    "aclnnTopkV2(self, int k, int dim, bool largest, bool ordered, int reserved, values*, indices*)",
    lambda x, k, dim, largest, ordered, _: _top(x, k, dim, largest, ordered),
)


def _search(edges: Tensor, x: Tensor, narrow: bool, right: bool, sorter: Tensor | None) -> Tensor:
    return torch.searchsorted(edges.contiguous(), x.contiguous(), out_int32=narrow, right=right, sorter=sorter)


TABLE.pure("aclnnSearchSorted(sorted, self, bool narrow, bool right, sorter?, out*)", _search)
TABLE.pure(
    "aclnnBucketize(self, boundaries, bool narrow, bool right, out*)",
    lambda x, edges, narrow, right: _search(edges, x, narrow, right, None),
)


@TABLE.add("aclnnBincount(self, weights?, int least_length, out*)")
def bincount(self: Tensor, weights: Tensor | None, least_length: int, out: Tensor) -> None:
    store(out, torch.bincount(self, weights, minlength=max(least_length, out.shape[0])))
