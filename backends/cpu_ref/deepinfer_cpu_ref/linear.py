"""Embedding, dense and grouped projections.

Legend: T rows, K in features, N out features, G groups, V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.weights import Precision, PreparedWeight, StoredWeight
from deepinfer_cpu_ref.computation import Computed, refuse, require_width
from deepinfer_cpu_ref.weights import QUANTISED_FORMATS, PreparedMatrices, dequantise, make_matrix


class CpuRefLinear(Computed, LinearOps):
    """Plain products of dequantised weights; padded ones when R2 is asked for."""

    def embed(self, ids_T: Tensor, table_VD: Tensor) -> Tensor:
        """See :meth:`LinearOps.embed`."""
        return table_VD[ids_T].to(self.computation.activation)

    def prepare(self, stored: StoredWeight, precision: Precision = "activation") -> PreparedWeight:
        """See :meth:`LinearOps.prepare`."""
        return self._prepare(stored, precision, groups=1)

    def dense(self, x_TK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.dense`."""
        matrices = _own("linear.dense", weight)
        if x_TK.dim() != 2:
            refuse("linear.dense", f"x has shape {tuple(x_TK.shape)}; give [T, {matrices.in_features}]")
        return self._products("linear.dense", x_TK.unsqueeze(1), matrices).squeeze(1)

    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        """See :meth:`LinearOps.prepare_grouped`."""
        if groups < 1 or stored.out_features % groups:
            refuse(
                "linear.prepare_grouped", f"{stored.name!r} has {stored.out_features} rows, not {groups} equal groups"
            )
        return self._prepare(stored, "activation", groups)

    def grouped(self, x_TGK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.grouped`."""
        matrices = _own("linear.grouped", weight)
        if x_TGK.dim() != 3 or x_TGK.shape[1] != len(matrices.groups):
            needed = f"[T, {len(matrices.groups)}, {matrices.in_features}]"
            refuse("linear.grouped", f"x has shape {tuple(x_TGK.shape)}; give {needed}")
        return self._products("linear.grouped", x_TGK, matrices)

    def _prepare(self, stored: StoredWeight, precision: Precision, groups: int) -> PreparedMatrices:
        exact = precision == "float32"
        dtype = self.computation.wide if exact else self.computation.activation
        quantised = stored.format in QUANTISED_FORMATS and not exact
        matrices = tuple(
            make_matrix(weight_NK, quantised=quantised, dtype=dtype, computation=self.computation)
            for weight_NK in dequantise(stored).chunk(groups)
        )
        nbytes = sum(matrix.nbytes for matrix in matrices)
        return PreparedMatrices(stored.name, nbytes, matrices, stored.in_features, out_dtype=dtype)

    def _products(self, op_name: str, x_TGK: Tensor, matrices: PreparedMatrices) -> Tensor:
        require_width(op_name, "x", x_TGK, matrices.in_features)
        if x_TGK.dtype not in (self.computation.activation, matrices.out_dtype):
            refuse(
                op_name,
                f"x is {x_TGK.dtype} for weight {matrices.name!r}; activations are {self.computation.activation}",
            )
        x_TGK = matrices.groups[0].quantised(x_TGK)
        products = [
            matrix.product(x_TGK[:, group], invariant=self.computation.invariant)
            for group, matrix in enumerate(matrices.groups)
        ]
        return torch.stack(products, dim=1).to(matrices.out_dtype)


def _own(op_name: str, weight: PreparedWeight) -> PreparedMatrices:
    if not isinstance(weight, PreparedMatrices):
        refuse(op_name, f"the weight is a {type(weight).__qualname__} that another implementation prepared")
    return weight
