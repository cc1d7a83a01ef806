"""Prepared weights: one matrix per group, as plain floats or as MXFP8 with scales in pairs.

A plain matrix holds the exact values of the stored weight in the dtype of its products, or in float32 where that
dtype would round them. Only the served mode on a chip with an MX matrix unit keeps quantised weights as they are.

Legend: T rows, G groups, N out features, K in features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.weights import PreparedWeight, StoredWeight
from deepinfer.errors import ArgumentError
from deepinfer.numerics import dequantise_fp8_weight, dequantise_mxfp4_weight
from deepinfer_ascend import layouts
from deepinfer_ascend.arithmetic import Arithmetic, refuse
from deepinfer_ascend.operators import Operators, Quantised

QUANTISED_FORMATS: Final = ("fp8_block32", "mxfp4")


@dataclass(eq=False)
class PlainMatrices(PreparedWeight):
    """Floats [G, N, K]; results leave in ``out_dtype``."""

    name: str
    nbytes: int
    weight_GNK: Tensor
    out_dtype: torch.dtype

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.weight_GNK.shape[2])

    def products(self, x_TGK: Tensor) -> Tensor:
        """Return [T, G, N], accumulated in float32 and rounded once."""
        x_GTK = x_TGK.to(self.weight_GNK.dtype).transpose(0, 1)
        if self.weight_GNK.shape[0] == 1:
            product_TN = F.linear(x_GTK[0], self.weight_GNK[0])
            return product_TN.unsqueeze(1).to(self.out_dtype)
        return torch.bmm(x_GTK, self.weight_GNK.transpose(1, 2)).transpose(0, 1).to(self.out_dtype)


@dataclass(eq=False)
class MxMatrices(PreparedWeight):
    """MXFP8 codes [G, K, N] with scales [G, K/64, N, 2]; K is padded, rows are quantised on their way in."""

    name: str
    nbytes: int
    codes_GKN: Tensor
    scales: Tensor
    in_features: int
    out_dtype: torch.dtype
    operators: Operators

    def products(self, x_TGK: Tensor) -> Tensor:
        """Return [T, G, N]."""
        groups, _, width = self.codes_GKN.shape
        if x_TGK.shape[0] == 0:
            return x_TGK.new_empty((0, groups, width), dtype=self.out_dtype)
        if groups == 1:
            x = quantised(self.operators, x_TGK[:, 0])
            product_TN = self.operators.mx_matmul(x, self.codes_GKN[0], self.scales[0], self.out_dtype)
            return product_TN.unsqueeze(1)
        x = quantised(self.operators, x_TGK)
        return self.operators.mx_matmul_of_groups(x, self.codes_GKN, self.scales, self.out_dtype)


Matrices = PlainMatrices | MxMatrices


def quantised(operators: Operators, x: Tensor) -> Quantised:
    """Return rows as MXFP8, K padded with zeros to whole pairs of groups."""
    return operators.quantise_rows(F.pad(x, (0, -x.shape[-1] % layouts.PAIR)).contiguous())


def make_matrices(
    stored: StoredWeight,
    arithmetic: Arithmetic,
    operators: Operators,
    *,
    groups: int = 1,
    out_dtype: torch.dtype | None = None,
    exact: bool = False,
) -> Matrices:
    """Prepare a stored weight whose rows are split into ``groups`` equal parts.

    Args:
        stored: the weight on the host.
        arithmetic: the engine's arithmetic.
        operators: the operators of the device.
        groups: number of parts.
        out_dtype: dtype of the results; None is the activation dtype.
        exact: compute and return float32, never quantise the input.
    """
    dtype = torch.float32 if exact else arithmetic.activation
    result = dtype if out_dtype is None else out_dtype
    if stored.format in QUANTISED_FORMATS and arithmetic.uses_mx and not exact:
        weight = layouts.mx_weight(stored)
        parts = [
            layouts.matmul_operand(layouts.MxWeight(codes, scales, is_fp4=False))
            for codes, scales in _parts(layouts.widened(weight) if weight.is_fp4 else weight, groups)
        ]
        codes_GKN = torch.stack([part.codes for part in parts]).view(torch.float8_e4m3fn).to(arithmetic.device)
        scales = torch.stack([part.scales for part in parts]).to(arithmetic.device)
        return MxMatrices(
            stored.name, _nbytes(codes_GKN, scales), codes_GKN, scales, stored.in_features, result, operators
        )
    weight_NK = float_weight(stored, dtype)
    weight_GNK = torch.unflatten(weight_NK, 0, (groups, -1)).contiguous().to(arithmetic.device)
    return PlainMatrices(stored.name, _nbytes(weight_GNK), weight_GNK, result)


def float_weight(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Return [N, K] with the stored weight's exact values, in ``dtype`` or in float32 where that would round."""
    weight_NK = dequantised(stored)
    as_asked = weight_NK.to(dtype)
    return as_asked if torch.equal(as_asked.to(weight_NK.dtype), weight_NK) else weight_NK.to(torch.float32)


def dequantised(stored: StoredWeight) -> Tensor:
    """Return the exact values: float32, or bfloat16 where the checkpoint holds it."""
    if stored.format == "engram_fp8":
        refuse("prepare", f"{stored.name!r} is an Engram table; tables are looked up by 'memory.gather_rows'")
    if stored.format not in QUANTISED_FORMATS:
        weight_NK = stored.weight
    elif stored.scale is None:
        refuse("prepare", f"{stored.name!r} is stored as {stored.format} but has no scale")
    else:
        decode = dequantise_fp8_weight if stored.format == "fp8_block32" else dequantise_mxfp4_weight
        try:
            weight_NK = decode(stored.weight, stored.scale)
        except ArgumentError as error:
            refuse("prepare", f"{stored.name!r} does not hold {stored.format} data: {'; '.join(error.problems)}")
    if tuple(weight_NK.shape) != (stored.out_features, stored.in_features):
        refuse(
            "prepare",
            f"{stored.name!r} decodes to {tuple(weight_NK.shape)}; "
            f"its out and in features say {(stored.out_features, stored.in_features)}",
        )
    return weight_NK


def _parts(weight: layouts.MxWeight, groups: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(weight.codes.chunk(groups), weight.scales_NG.chunk(groups), strict=True))


def _nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
