"""Dense and grouped projections in one call each.

Legend: T rows, K in features, N out features, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.weights import PreparedWeight, StoredWeight
from deepinfer_cpu_ref.linear import CpuRefLinear
from deepinfer_cpu_ref.weights import Matrix, PreparedMatrices, dequantise


@dataclass(eq=False)
class StackedMatrices(PreparedMatrices):
    """The matrices of all groups in one tensor [G, N, K], of which each group's matrix is a view."""

    stacked_GNK: Tensor


class QuickLinear(CpuRefLinear):
    """The readable products without the steps that one float32 matrix does not need."""

    def dense(self, x_TK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.dense`."""
        if (
            isinstance(weight, PreparedMatrices)
            and len(weight.groups) == 1
            and x_TK.dim() == 2
            and x_TK.shape[1] == weight.in_features
            and x_TK.dtype == weight.groups[0].weight_NK.dtype == torch.float32
        ):
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
            return torch.bmm(x_TGK.transpose(0, 1), weight.stacked_GNK.transpose(1, 2)).transpose(0, 1)
        return super().grouped(x_TGK, weight)
