"""DeepGEMM's fp8 product as a provider of ``linear.dense`` for fp8 weights in served numerics on SM100.

Rows are encoded by our own kernel, so that their codes are the contract's. Scales are handed over as the library wants
them: four powers of two in an int32, the rows side by side, each group of 128 channels starting at a multiple of 16
bytes. Weights whose K is not whole groups of 128 stay with our kernels.

Legend: T rows, N out features, K in features, G groups of 32 along K, P packs of four groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.weights import Precision, PreparedWeight, StoredWeight

RECIPE: Final = (1, 1, 32)
"""Rows of x, rows of the weight and channels that share a scale."""
GROUP: Final = 32
PACK: Final = 4
ALIGNMENT_BYTES: Final = 16


@dataclass(eq=False)
class PreparedCodes(PreparedWeight):
    """A weight as the library reads it."""

    name: str
    nbytes: int
    codes_NK: Tensor
    packed_NP: Tensor


class DeepGemmLinear(LinearOps):
    """fp8 weights by the library; embeddings, other formats and grouped products by our own kernels."""

    def __init__(self, library: Any, options: OpOptions, own: LinearOps) -> None:
        self._library = library
        self._options = options
        self._own = own
        library.use_deterministic_algorithms(True)  # noqa: FBT003 (the library names no parameter)

    def embed(self, ids_T: Tensor, table_VD: Tensor) -> Tensor:
        """See :meth:`LinearOps.embed`."""
        return self._own.embed(ids_T, table_VD)

    def prepare(self, stored: StoredWeight, precision: Precision = "activation") -> PreparedWeight:
        """See :meth:`LinearOps.prepare`."""
        if not self._can_serve(stored, precision) or stored.scale is None:
            return self._own.prepare(stored, precision)
        scale = stored.scale.view(torch.uint8).repeat_interleave(GROUP, 0)[: stored.out_features]
        packed_NP = packed_scales(scale)
        codes_NK = stored.weight.view(torch.float8_e4m3fn).contiguous()
        return PreparedCodes(stored.name, codes_NK.numel() + 4 * packed_NP.numel(), codes_NK, packed_NP)

    def dense(self, x_TK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.dense`."""
        if not isinstance(weight, PreparedCodes):
            return self._own.dense(x_TK, weight)
        from deepinfer_triton.row_codes import row_codes

        if weight.codes_NK.device != x_TK.device:
            weight.codes_NK = weight.codes_NK.to(x_TK.device)
            weight.packed_NP = _moved(weight.packed_NP, x_TK.device)
        out_TN = torch.empty((x_TK.shape[0], weight.codes_NK.shape[0]), dtype=torch.bfloat16, device=x_TK.device)
        if out_TN.numel():
            rows = row_codes(x_TK)
            x = (rows.codes_nK.view(torch.float8_e4m3fn), packed_scales(rows.scales_nG))
            self._library.fp8_fp4_gemm_nt(x, (weight.codes_NK, weight.packed_NP), out_TN, c=None, recipe=RECIPE)
        return out_TN

    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        """See :meth:`LinearOps.prepare_grouped`."""
        return self._own.prepare_grouped(stored, groups)

    def grouped(self, x_TGK: Tensor, weight: PreparedWeight) -> Tensor:
        """See :meth:`LinearOps.grouped`."""
        return self._own.grouped(x_TGK, weight)

    def _can_serve(self, stored: StoredWeight, precision: Precision) -> bool:
        return (
            stored.format == "fp8_block32"
            and precision == "activation"
            and stored.in_features % (GROUP * PACK) == 0
            and self._options.numerics == "served"
            and self._options.activation_dtype == torch.bfloat16
        )


def packed_scales(scales_nG: Tensor) -> Tensor:
    """Return int32 [n, P] of uint8 powers [n, G], G a multiple of 4: rows side by side, padded to 16 bytes a column."""
    rows, groups = scales_nG.shape
    packs = groups // PACK
    padded = -(-rows // (ALIGNMENT_BYTES // 4)) * (ALIGNMENT_BYTES // 4)
    memory_Pn = torch.zeros((packs, padded), dtype=torch.int32, device=scales_nG.device)
    memory_Pn[:, :rows] = scales_nG.contiguous().view(torch.int32).t()
    return memory_Pn.t()[:rows]


def _moved(packed_NP: Tensor, device: torch.device) -> Tensor:
    rows, packs = packed_NP.shape
    stride = packed_NP.stride(1)
    memory = packed_NP.as_strided((packs, stride), (stride, 1)).to(device)
    return memory.t()[:rows]
