"""Embedding, dense and grouped projections.

served on a 950: MXFP8 rows by MXFP8 weights (npu_quant_matmul; npu_transpose_quant_batchmatmul for groups). Our fp8
weights with 32 x 32 blocks are MXFP8 exactly. portable: torch's own products of exactly dequantised weights.

Legend: T rows, K in features, N out features, G groups, V vocabulary, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.weights import Precision, PreparedWeight, StoredWeight
from deepinfer_ascend.arithmetic import Arithmetic, refuse, require_width
from deepinfer_ascend.matrices import Matrices, MxMatrices, PlainMatrices, make_matrices
from deepinfer_ascend.operators import Operators


class NativeLinear(LinearOps):
    """Products in the matrix unit."""

    def __init__(self, arithmetic: Arithmetic, operators: Operators) -> None:
        self._arithmetic = arithmetic
        self._operators = operators

    def embed(self, ids_T: Tensor, table_VD: Tensor) -> Tensor:
        """See :meth:`LinearOps.embed`."""
        return table_VD.index_select(0, ids_T).to(self._arithmetic.activation)

    def prepare(self, stored: StoredWeight, precision: Precision = "activation") -> PreparedWeight:
        """See :meth:`LinearOps.prepare`."""
        return make_matrices(stored, self._arithmetic, self._operators, exact=precision == "float32")

    def dense(self, x_TK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.dense`."""
        matrices = _own("linear.dense", weight)
        if x_TK.dim() != 2:
            refuse("linear.dense", f"x has shape {tuple(x_TK.shape)}; give [T, {matrices.in_features}]")
        require_width("linear.dense", "x", x_TK, matrices.in_features)
        return matrices.products(x_TK.unsqueeze(1)).squeeze(1)

    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        """See :meth:`LinearOps.prepare_grouped`."""
        if groups < 1 or stored.out_features % groups:
            refuse(
                "linear.prepare_grouped", f"{stored.name!r} has {stored.out_features} rows, not {groups} equal groups"
            )
        return make_matrices(stored, self._arithmetic, self._operators, groups=groups)

    def grouped(self, x_TGK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.grouped`."""
        matrices = _own("linear.grouped", weight)
        groups = matrices.codes_GKN.shape[0] if isinstance(matrices, MxMatrices) else matrices.weight_GNK.shape[0]
        if x_TGK.dim() != 3 or x_TGK.shape[1] != groups:
            refuse("linear.grouped", f"x has shape {tuple(x_TGK.shape)}; give [T, {groups}, {matrices.in_features}]")
        require_width("linear.grouped", "x", x_TGK, matrices.in_features)
        return matrices.products(x_TGK)


def _own(op_name: str, weight: PreparedWeight) -> Matrices:
    if not isinstance(weight, PlainMatrices | MxMatrices):
        refuse(op_name, f"the weight is a {type(weight).__qualname__} that another implementation prepared")
    return weight
