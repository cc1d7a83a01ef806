"""Grouped matrices of experts: plain floats, MXFP8, or packed MXFP4 (W4A8).

Legend: E experts, N out features, K in features, n routed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.weights import StoredWeight
from deepinfer_ascend import layouts
from deepinfer_ascend.arithmetic import Arithmetic, refuse
from deepinfer_ascend.matrices import QUANTISED_FORMATS, float_weight, quantised
from deepinfer_ascend.operators import Operators


@dataclass(frozen=True, slots=True, eq=False)
class PlainExperts:
    """Floats [E, K, N]; rows are converted to their dtype, results leave in ``out_dtype``."""

    weight_EKN: Tensor
    out_dtype: torch.dtype
    operators: Operators

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.weight_EKN.numel() * self.weight_EKN.element_size()

    @property
    def form(self) -> str:
        """How the tensors are read, in words."""
        return f"floats for {self.out_dtype}"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What holds the experts, E first."""
        return (self.weight_EKN,)

    def products(self, x_nK: Tensor, counts_E: Tensor) -> Tensor:
        """Return [n, N]."""
        x_nK = x_nK.to(self.weight_EKN.dtype).contiguous()
        return self.operators.grouped_matmul(x_nK, self.weight_EKN, counts_E).to(self.out_dtype)


@dataclass(frozen=True, slots=True, eq=False)
class MxExperts:
    """MXFP8 [E, K, N] with scales [E, K/64, N, 2], or packed MXFP4 [E, N, K/2] with scales [E, N, K/64, 2]."""

    codes: Tensor
    scales: Tensor
    is_fp4: bool
    out_dtype: torch.dtype
    operators: Operators

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.codes.numel() * self.codes.element_size() + self.scales.numel()

    @property
    def form(self) -> str:
        """How the tensors are read, in words."""
        return f"{'mxfp4' if self.is_fp4 else 'mxfp8'} for {self.out_dtype}"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What holds the experts, E first: codes and scales."""
        return (self.codes, self.scales)

    def products(self, x_nK: Tensor, counts_E: Tensor) -> Tensor:
        """Return [n, N]."""
        x = quantised(self.operators, x_nK)
        multiply = self.operators.grouped_matmul_mxfp4 if self.is_fp4 else self.operators.grouped_matmul_mxfp8
        return multiply(x, self.codes, self.scales, counts_E).to(self.out_dtype)


GroupedMatrices = PlainExperts | MxExperts


def make_grouped(
    experts: Sequence[tuple[StoredWeight, ...]],
    arithmetic: Arithmetic,
    operators: Operators,
    *,
    out_dtype: torch.dtype,
    in_nz: bool = False,
) -> GroupedMatrices:
    """Prepare one matrix an expert, each made of stored weights set below each other.

    Args:
        experts: the parts of each expert's matrix, in order of their rows.
        arithmetic: the engine's arithmetic.
        operators: the operators of the device.
        out_dtype: dtype of the results.
        in_nz: move packed MXFP4 weights into the NZ format, once, on the device.
    """
    formats = sorted({part.format for parts in experts for part in parts})
    if len(formats) > 1 and any(name in QUANTISED_FORMATS for name in formats):
        refuse("experts.prepare", f"the experts of one layer are stored as {', '.join(formats)}; give one format")
    if formats[0] not in QUANTISED_FORMATS or not arithmetic.uses_mx:
        stacked = [torch.cat([float_weight(part, arithmetic.activation) for part in parts]) for parts in experts]
        weight_EKN = torch.stack(_one_dtype(stacked)).transpose(1, 2).contiguous()
        return PlainExperts(weight_EKN.to(arithmetic.device), out_dtype, operators)
    weights = [_stacked([layouts.mx_weight(part) for part in parts]) for parts in experts]
    if formats[0] == "mxfp4":
        codes = torch.stack([weight.codes for weight in weights]).to(arithmetic.device)
        scales = torch.stack([layouts.paired(weight.scales_NG) for weight in weights]).to(arithmetic.device)
        if in_nz:
            codes = operators.cast_mxfp4_to_nz(codes)
        return MxExperts(codes, scales, True, out_dtype, operators)  # noqa: FBT003 (is_fp4)
    operands = [layouts.matmul_operand(weight) for weight in weights]
    codes = torch.stack([operand.codes for operand in operands]).view(torch.float8_e4m3fn).to(arithmetic.device)
    scales = torch.stack([operand.scales for operand in operands]).to(arithmetic.device)
    return MxExperts(codes, scales, False, out_dtype, operators)  # noqa: FBT003 (is_fp4)


def _stacked(parts: Sequence[layouts.MxWeight]) -> layouts.MxWeight:
    return layouts.MxWeight(
        torch.cat([part.codes for part in parts]), torch.cat([part.scales_NG for part in parts]), parts[0].is_fp4
    )


def _one_dtype(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return all in the widest dtype among them: one that float32 alone can hold makes all float32."""
    dtypes = {weight.dtype for weight in weights}
    return list(weights) if len(dtypes) == 1 else [weight.float() for weight in weights]
