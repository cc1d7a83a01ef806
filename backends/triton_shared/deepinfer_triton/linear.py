"""Op group ``linear``: embedding, dense and grouped projections.

Legend: T rows, K in features, N out features, G groups, V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.weights import Precision, PreparedWeight, StoredWeight
from deepinfer_triton.arithmetic import TritonGroup, refuse, require_width
from deepinfer_triton.dense_product import dense_product
from deepinfer_triton.embedding import embed
from deepinfer_triton.stored_matrices import Matrices, matrices_of


@dataclass(eq=False)
class PreparedMatrices(PreparedWeight):
    """One matrix a group, and how products with them are computed.

    Attributes:
        matrices: the weight.
        out_dtype: of the results.
        quantises: rows are quantised first.
    """

    name: str
    nbytes: int
    matrices: Matrices
    out_dtype: torch.dtype
    quantises: bool


class TritonLinearOps(TritonGroup, LinearOps):
    """Codes stay codes in memory; served numerics multiply them by block-scaled matrix units."""

    def __init__(self, options: OpOptions) -> None:
        super().__init__(options)
        self._invariant = options.batch_invariant

    def embed(self, ids_T: Tensor, table_VD: Tensor) -> Tensor:
        """See :meth:`LinearOps.embed`."""
        return embed(ids_T, table_VD, self.arithmetic.activation)

    def prepare(self, stored: StoredWeight, precision: Precision = "activation") -> PreparedWeight:
        """See :meth:`LinearOps.prepare`."""
        return self._prepare(stored, matrices_of("linear.prepare", (stored,)), precision)

    def dense(self, x_TK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.dense`."""
        own = self._own("linear.dense", x_TK, weight)
        if x_TK.dim() != 2:
            refuse("linear.dense", f"x has shape {tuple(x_TK.shape)}; give [T, {own.matrices.in_features}]")
        return self._products(x_TK.unsqueeze(1), own).squeeze(1)

    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        """See :meth:`LinearOps.prepare_grouped`."""
        if groups < 1 or stored.out_features % groups:
            refuse(
                "linear.prepare_grouped", f"{stored.name!r} has {stored.out_features} rows, not {groups} equal groups"
            )
        return self._prepare(stored, matrices_of("linear.prepare_grouped", (stored,), groups), "activation")

    def grouped(self, x_TGK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.grouped`."""
        own = self._own("linear.grouped", x_TGK, weight)
        if x_TGK.dim() != 3 or x_TGK.shape[1] != own.matrices.count:
            needed = f"[T, {own.matrices.count}, {own.matrices.in_features}]"
            refuse("linear.grouped", f"x has shape {tuple(x_TGK.shape)}; give {needed}")
        return self._products(x_TGK, own)

    def _prepare(self, stored: StoredWeight, matrices: Matrices, precision: Precision) -> PreparedMatrices:
        exact = precision == "float32"
        return PreparedMatrices(
            stored.name,
            matrices.nbytes,
            matrices,
            out_dtype=torch.float32 if exact else self.arithmetic.activation,
            quantises=self.arithmetic.served and not exact,
        )

    def _products(self, x_TGK: Tensor, own: PreparedMatrices) -> Tensor:
        return dense_product(x_TGK, own.matrices, own.out_dtype, quantises=own.quantises, invariant=self._invariant)

    def _own(self, op_name: str, x: Tensor, weight: PreparedWeight) -> PreparedMatrices:
        if not isinstance(weight, PreparedMatrices):
            refuse(op_name, f"the weight is a {type(weight).__qualname__} that another implementation prepared")
        require_width(op_name, "x", x, weight.matrices.in_features)
        if x.dtype not in (self.arithmetic.activation, weight.out_dtype):
            activation = self.arithmetic.activation
            refuse(op_name, f"x is {x.dtype} for weight {weight.name!r}; activations are {activation}")
        return weight
