"""Linear ops: embedding, dense and grouped projections.

Legend: T rows, K in features, N out features, G groups, V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op
from deepinfer.accelerator.weights import Precision, PreparedWeight, StoredWeight


class LinearOps(OpGroup):
    """Matrix products with weights in any stored format.

    Numerics (model.md section 18). portable: weights are dequantised exactly, inputs are not quantised.
    served: the input of an fp8 or mxfp4 weight is first quantised per 32 along K (e4m3 codes, power-of-two scale
    ``2^ceil(log2(max(amax, 1e-4) / 448))``). Accumulation is at least float32; the result is rounded once.
    """

    group = "linear"
    bound_together = (("prepare", "dense"), ("prepare_grouped", "grouped"))

    @op
    def embed(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return the embedding rows of token ids in the activation dtype.

        Args:
            ids_T: int64 [T], each in [0, V); out-of-range ids are the caller's fault and are undefined.
            table_VD: float32 or bfloat16 [V, D] on the device.

        Returns:
            [T, D], not scaled. T = 0 gives [0, D]. Class R2 by nature: a copy.
        """
        not_implemented(self, "embed")

    @op
    def prepare(self, stored: StoredWeight, precision: Precision = "activation") -> PreparedWeight:
        """Convert a stored weight once, at load, into the layout that :meth:`dense` wants.

        Args:
            stored: float32, bfloat16, fp8_block32 or mxfp4 weight on the host.
            precision: "activation": product in the activation dtype. "float32": the product is computed and
                returned in float32 (float64 when the activation dtype is float64), inputs promoted, never
                quantised; used for the router, ratio-2 compression and the vocabulary projection.
        """
        not_implemented(self, "prepare")

    @op
    def dense(self, x_TK: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
        """Return ``x @ W^T`` [T, N] for a weight made by this implementation's :meth:`prepare`.

        Output dtype: the activation dtype, or float32/float64 for weights prepared with precision "float32".
        NaN in a row stays in that row. T = 0 gives [0, N]. Inputs may be non-contiguous.
        R2: a row's bits must not depend on T, its position, or its neighbours' values.
        """
        not_implemented(self, "dense")

    @op
    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        """Convert the stacked weight of a grouped projection: rows ``g*N .. (g+1)*N`` belong to group g."""
        not_implemented(self, "prepare_grouped")

    @op
    def grouped(self, x_TGK: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
        """Return z [T, G, N] with ``z[t, g] = x[t, g] @ W_g^T`` (first half of the output projection, model.md 4).

        served: the input is quantised per 32 along K like every fp8 linear's. Otherwise as :meth:`dense`.
        """
        not_implemented(self, "grouped")
