"""Operators that move elements: joins, shapes, indices."""

# ruff: noqa: FBT001 (booleans stand where the operator has them)

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from host_cann.errors import KernelError
from host_cann.kernels.registry import KernelTable, Shapes
from host_cann.views import store

TABLE = KernelTable()

TABLE.pure("aclnnCat(list tensors, int dim, out*)", torch.cat)
TABLE.pure("aclnnStack(list tensors, int dim, out*)", torch.stack)
TABLE.pure("aclnnRepeat(self, ints repeats, out*)", lambda x, repeats: x.repeat(repeats))
TABLE.pure("aclnnExpand(self, ints size, out*)", lambda x, size: x.expand(size))
TABLE.pure("aclnnPermute(self, ints dims, out*)", torch.permute)
TABLE.pure("aclnnRoll(self, ints shifts, ints dims, out*)", lambda x, shifts, dims: torch.roll(x, shifts, dims or ()))
TABLE.pure("aclnnFlip(self, ints dims, out*)", torch.flip)
TABLE.pure("aclnnTril(self, int diagonal, out*)", torch.tril)
TABLE.pure("aclnnTriu(self, int diagonal, out*)", torch.triu)
TABLE.pure("aclnnInplaceTril(self&, int diagonal)", torch.tril)
TABLE.pure("aclnnInplaceTriu(self&, int diagonal)", torch.triu)
TABLE.pure("aclnnConstantPadNd(self, ints padding, scalar value, out*)", lambda x, p, value: F.pad(x, p, value=value))
TABLE.pure("aclnnRepeatInterleaveInt(self, int n, int size, out*)", lambda x, n, _: torch.repeat_interleave(x, n))
TABLE.pure(
    "aclnnRepeatInterleaveIntWithDim(self, int n, int dim, int size, out*)",
    lambda x, n, dim, _: x.repeat_interleave(n, dim),
)
TABLE.pure(
    "aclnnRepeatInterleave(self, counts, int size, out*)",
    lambda x, counts, _: torch.repeat_interleave(x.flatten(), counts),
)
TABLE.pure(
    "aclnnRepeatInterleaveWithDim(self, counts, int dim, int size, out*)",
    lambda x, counts, dim, _: x.repeat_interleave(counts, dim),
)
TABLE.pure("aclnnEmbedding(weight, indices, out*)", lambda weight, indices: weight[_checked(indices, weight.shape[0])])


@TABLE.add("aclnnOneHot(self, int classes, on_value, off_value, int axis, out*)")
def one_hot(self: Tensor, classes: int, on_value: Tensor, off_value: Tensor, axis: int, out: Tensor) -> None:
    if axis not in (-1, self.dim()):
        raise KernelError(f"is emulated along the last axis, not {axis}")
    hot = self.unsqueeze(-1) == torch.arange(classes)
    store(out, torch.where(hot, on_value.reshape(()), off_value.reshape(())))


# ---- one index per element or per row
def _checked(index: Tensor, size: int) -> Tensor:
    """Return the index as int64; out of range is an error here, undefined on the chip."""
    wide = index.long()
    if wide.numel() and not (-size <= int(wide.min()) and int(wide.max()) < size):
        raise KernelError(f"index {int(wide.min())}..{int(wide.max())} leaves a dimension of {size}")
    return torch.where(wide < 0, wide + size, wide)


def _checked_along(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return _checked(index, x.shape[dim] if x.dim() else 1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return torch.take(x, _checked(index, x.numel()))


TABLE.pure("aclnnTake(self, index, out*)", _take)
TABLE.pure(
    "aclnnIndexSelect(self, int dim, index, out*)", lambda x, d, i: x.index_select(d, _checked_along(x, d, i).flatten())
)
TABLE.pure("aclnnGather(self, int dim, index, out*)", lambda x, d, i: x.gather(d, _checked_along(x, d, i)))
TABLE.pure(
    "aclnnScatterAdd(self, int dim, index, source, out*)",
    lambda x, d, i, s: x.scatter_add(d, _checked_along(x, d, i), s),
)
TABLE.pure(
    "aclnnInplaceIndexCopy(self&, int dim, index, source)",
    lambda x, d, i, s: x.index_copy(d, _checked_along(x, d, i), s),
)
TABLE.pure(
    "aclnnInplaceIndexFill(self&, int dim, index, scalar value)",
    lambda x, d, i, v: x.index_fill(d, _checked_along(x, d, i), v),
)
TABLE.pure(
    "aclnnIndexAdd(self, int dim, index, source, scalar alpha, out*)",
    lambda x, d, i, s, alpha: x.index_add(d, _checked_along(x, d, i), s, alpha=alpha),
)

_SCATTER_REDUCTIONS = {0: None, 1: "add", 2: "multiply"}


def _scatter(x: Tensor, dim: int, index: Tensor, source: Tensor | float, reduction: int) -> Tensor:
    if reduction not in _SCATTER_REDUCTIONS:
        raise KernelError(f"has no reduction {reduction}; known are {_SCATTER_REDUCTIONS}")
    name = _SCATTER_REDUCTIONS[reduction]
    index = _checked_along(x, dim, index)
    return x.scatter(dim, index, source) if name is None else x.scatter(dim, index, source, reduce=name)


TABLE.pure("aclnnScatter(self, int dim, index, source, int reduction, out*)", _scatter)
TABLE.pure("aclnnScatterValue(self, int dim, index, scalar value, int reduction, out*)", _scatter)
TABLE.pure("aclnnInplaceScatter(self&, int dim, index, source, int reduction)", _scatter)
TABLE.pure("aclnnInplaceScatterValue(self&, int dim, index, scalar value, int reduction)", _scatter)


# ---- advanced indexing: a float tensor of size 0 stands for a whole dimension
def _indices(x: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor | slice, ...]:
    found: list[Tensor | slice] = []
    for index in indices:
        if index.dtype.is_floating_point and index.numel() == 0:
            found.append(slice(None))
        elif index.dtype in (torch.bool, torch.uint8):
            found.append(index.bool())
        else:
            found.append(_checked(index, x.shape[len(found)]))
    return tuple(found)


TABLE.pure("aclnnIndex(self, list indices, out*)", lambda x, indices: x[_indices(x, indices)])


@TABLE.add("aclnnIndexPutImpl(self&, list indices, values, bool accumulate, bool unsafe)")
def index_put(self: Tensor, indices: list[Tensor], values: Tensor, accumulate: bool, unsafe: bool) -> None:
    picked = _indices(self, indices)
    if not accumulate:
        self[picked] = values.to(self.dtype)
        return
    spread = tuple(torch.arange(self.shape[i]) if isinstance(p, slice) else p for i, p in enumerate(picked))
    if any(isinstance(p, slice) for p in picked):
        raise KernelError(f"accumulates along leading dimensions only, not with {len(spread)} indices and a whole one")
    self.index_put_(spread, values.to(self.dtype), accumulate=True)


# ---- results whose size is known when they are computed: the descriptor gets the shape
def _store_front(out: Tensor, value: Tensor) -> tuple[int, ...]:
    if value.numel() > out.numel():
        raise KernelError(f"computes {tuple(value.shape)}, more than the {tuple(out.shape)} allotted")
    flat = torch.as_strided(out, (value.numel(),), (1,))
    flat.copy_(value.flatten())
    return tuple(value.shape)


@TABLE.add("aclnnNonzero(self, out*)")
def nonzero(self: Tensor, out: Tensor) -> Shapes:
    return {"out": _store_front(out, self.nonzero())}


@TABLE.add("aclnnNonzeroV2(self, out*)")
def nonzero_by_dimension(self: Tensor, out: Tensor) -> Shapes:
    return {"out": _store_front(out, self.nonzero().t().contiguous())}


@TABLE.add("aclnnMaskedSelect(self, mask, out*)")
def masked_select(self: Tensor, mask: Tensor, out: Tensor) -> Shapes:
    return {"out": _store_front(out, torch.masked_select(self, mask.bool()))}


TABLE.pure(
    "aclnnInplaceMaskedScatter(self&, mask, source)", lambda x, mask, source: x.masked_scatter(mask.bool(), source)
)


@TABLE.add("aclnnUnique2(self, bool ordered, bool wants_inverse, bool wants_counts, values*, inverse*, counts*)")
def unique(
    self: Tensor,
    ordered: bool,
    wants_inverse: bool,
    wants_counts: bool,
    values: Tensor,
    inverse: Tensor,
    counts: Tensor,
) -> Shapes:
    found, places, times = torch.unique(self, sorted=True, return_inverse=True, return_counts=True)
    shapes = {"values": _store_front(values, found)}
    if wants_inverse or wants_counts:
        shapes["inverse"] = _store_front(inverse, places)
    if wants_counts:
        shapes["counts"] = _store_front(counts, times)
    return shapes
