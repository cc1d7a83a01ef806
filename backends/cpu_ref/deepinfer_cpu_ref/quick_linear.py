"""Dense and grouped projections in one call each.

How a product of few rows and a wide matrix is put decides how long it takes (docs/performance.md): one row is two
halves in a batch, which two threads share; a few rows are the matrix times the turned rows, which MKL computes without
packing the matrix first.

Legend: T rows, K in features, N out features, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.weights import Precision, PreparedWeight, StoredWeight
from deepinfer_cpu_ref.linear import CpuRefLinear
from deepinfer_cpu_ref.quick_memory import empty_weight
from deepinfer_cpu_ref.weights import Matrix, PreparedMatrices, dequantise

WIDE_FEATURES = 2048
"""Matrices with fewer out features gain nothing from a way of their own."""

FEW_ROWS = 8
"""Products of more rows pay for packing the matrix."""


@dataclass(eq=False)
class WideMatrix(PreparedMatrices):
    """One matrix with many out features, in huge pages."""


@dataclass(eq=False)
class StackedMatrices(PreparedMatrices):
    """The matrices of all groups in one tensor [G, N, K], of which each group's matrix is a view."""

    stacked_GNK: Tensor


class QuickLinear(CpuRefLinear):
    """The readable products without the steps that one float32 matrix does not need."""

    def prepare(self, stored: StoredWeight, precision: Precision = "activation") -> PreparedWeight:
        """See :meth:`LinearOps.prepare`."""
        prepared = self._prepare(stored, precision, groups=1)
        matrix = prepared.groups[0]
        if matrix.out_features < WIDE_FEATURES or matrix.weight_NK.dtype != torch.float32:
            return prepared
        paged_NK = empty_weight(*matrix.weight_NK.shape).copy_(matrix.weight_NK)
        paged = Matrix(paged_NK, matrix.out_features, matrix.quantises_input)
        return WideMatrix(prepared.name, prepared.nbytes, (paged,), prepared.in_features, prepared.out_dtype)

    def dense(self, x_TK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.dense`."""
        if (
            isinstance(weight, PreparedMatrices)
            and len(weight.groups) == 1
            and x_TK.dim() == 2
            and x_TK.shape[1] == weight.in_features
            and x_TK.dtype == weight.groups[0].weight_NK.dtype == torch.float32
        ):
            matrix_NK = weight.groups[0].weight_NK
            if isinstance(weight, WideMatrix) and 0 < x_TK.shape[0] <= FEW_ROWS:
                return _few_rows(x_TK, matrix_NK)
            return F.linear(x_TK, matrix_NK)
        return super().dense(x_TK, weight)

    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        """See :meth:`LinearOps.prepare_grouped`."""
        if groups < 1 or stored.out_features % groups:
            return super().prepare_grouped(stored, groups)
        stacked_GNK = torch.unflatten(dequantise(stored).to(torch.float32).contiguous(), 0, (groups, -1))
        out_features = stacked_GNK.shape[1]
        matrices = tuple(Matrix(weight_NK, out_features, quantises_input=False) for weight_NK in stacked_GNK)
        nbytes = sum(matrix.nbytes for matrix in matrices)
        return StackedMatrices(stored.name, nbytes, matrices, stored.in_features, torch.float32, stacked_GNK)

    def grouped(self, x_TGK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.grouped`."""
        if (
            isinstance(weight, StackedMatrices)
            and x_TGK.dtype == torch.float32
            and x_TGK.shape[1:] == (weight.stacked_GNK.shape[0], weight.in_features)
        ):
            if len(x_TGK) == 1:
                return _group_by_group(x_TGK, weight.stacked_GNK.transpose(1, 2))
            return torch.bmm(x_TGK.transpose(0, 1), weight.stacked_GNK.transpose(1, 2)).transpose(0, 1)
        return super().grouped(x_TGK, weight)


def _few_rows(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    out_features, in_features = weight_NK.shape
    if len(x_TK) > 1:
        return torch.mm(weight_NK, x_TK.t()).t().contiguous()
    halves = 2 if out_features % 2 == 0 else 1
    halves_2nK = weight_NK.view(halves, -1, in_features)
    return torch.bmm(halves_2nK, x_TK.t().expand(halves, -1, 1)).view(1, out_features)


def _group_by_group(x_1GK: Tensor, turned_GKN: Tensor) -> Tensor:
    """Return [1, G, N] on one thread: a single row is not worth waking a second one in every layer."""
    product_1GN = x_1GK.new_empty((1, turned_GKN.shape[0], turned_GKN.shape[2]))
    for x_1K, matrix_KN, product_1N in zip(
        torch.split(x_1GK[0], 1), turned_GKN, torch.split(product_1GN[0], 1), strict=True
    ):
        torch.mm(x_1K, matrix_KN, out=product_1N)
    return product_1GN
