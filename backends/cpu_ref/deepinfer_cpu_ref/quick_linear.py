"""Dense and grouped projections in one call each.

Wide matrices lie turned, out features fastest. A product with one row then adds up long runs of memory, which a
processor fetches ahead twice as fast as it does the many short rows of the other layout; a few rows are multiplied one
by one for the same reason.

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
"""Matrices with so many out features are turned."""

FEW_ROWS = 8
"""Up to so many rows are multiplied with a turned matrix one by one."""

LEAST_HALVED = 2**23
"""Elements from which on a matrix is worth a second thread: one thread alone does not use up the memory's speed."""


@dataclass(eq=False)
class TurnedMatrices(PreparedMatrices):
    """One matrix of which a turned copy [K, N] is kept, and nothing else: the matrix itself is a view of it."""

    turned_KN: Tensor


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
        turned_KN = empty_weight(prepared.in_features, matrix.out_features).copy_(matrix.weight_NK.t())
        view = Matrix(turned_KN.t(), matrix.out_features, matrix.quantises_input)
        return TurnedMatrices(
            prepared.name, prepared.nbytes, (view,), prepared.in_features, prepared.out_dtype, turned_KN
        )

    def dense(self, x_TK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.dense`."""
        if (
            isinstance(weight, PreparedMatrices)
            and len(weight.groups) == 1
            and x_TK.dim() == 2
            and x_TK.shape[1] == weight.in_features
            and x_TK.dtype == weight.groups[0].weight_NK.dtype == torch.float32
        ):
            if isinstance(weight, TurnedMatrices) and 0 < x_TK.shape[0] <= FEW_ROWS:
                return _row_by_row(x_TK, weight.turned_KN)
            return F.linear(x_TK, weight.groups[0].weight_NK)
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


def _row_by_row(x_TK: Tensor, turned_KN: Tensor) -> Tensor:
    in_features, out_features = turned_KN.shape
    is_halved = turned_KN.numel() >= LEAST_HALVED and out_features % 2 == 0
    if x_TK.shape[0] == 1 and not is_halved:
        return torch.mm(x_TK, turned_KN)
    product_TN = x_TK.new_empty((x_TK.shape[0], out_features))
    if not is_halved:
        for x_1K, product_1N in zip(torch.split(x_TK, 1), torch.split(product_TN, 1), strict=True):
            torch.mm(x_1K, turned_KN, out=product_1N)
        return product_TN
    # A product with one row stays on one thread; a batch of two halves does not.
    halves_2Kn = turned_KN.view(in_features, 2, -1).transpose(0, 1)
    for x_1K, product_N in zip(torch.split(x_TK, 1), product_TN, strict=True):
        torch.bmm(x_1K.expand(2, 1, -1), halves_2Kn, out=product_N.view(2, 1, -1))
    return product_TN


def _group_by_group(x_1GK: Tensor, turned_GKN: Tensor) -> Tensor:
    """Return [1, G, N] on one thread: a single row is not worth waking a second one in every layer."""
    product_1GN = x_1GK.new_empty((1, turned_GKN.shape[0], turned_GKN.shape[2]))
    for x_1K, matrix_KN, product_1N in zip(
        torch.split(x_1GK[0], 1), turned_GKN, torch.split(product_1GN[0], 1), strict=True
    ):
        torch.mm(x_1K, matrix_KN, out=product_1N)
    return product_1GN
