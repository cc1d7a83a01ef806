"""RMSNorm and rotary positions.

Both operators are fed float32: with bfloat16 rows they round inside (npu_rms_norm before the weight, npu_rotary_mul
its cosines), and the contract rounds once.

Legend: T rows, D width, H heads, C head width, R rotary pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.ops.norm import NormOps, RotaryTable
from deepinfer_ascend.arithmetic import refuse, require_width
from deepinfer_ascend.operators import Operators


class NativeNorm(NormOps):
    """npu_rms_norm and npu_rotary_mul."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def rms(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See :meth:`NormOps.rms`."""
        require_width("norm.rms", "x", x_TD, weight_D.shape[0])
        if x_TD.numel() == 0:
            return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        return self._operators.rms_norm(x_TD.float().contiguous(), weight_D.float(), eps).to(x_TD.dtype)

    def rotary(self, x: Tensor, table: RotaryTable, position_T: Tensor, *, inverse: bool = False) -> Tensor:
        """See :meth:`NormOps.rotary`."""
        width = table.rotary_width
        if x.dim() not in (2, 3) or x.shape[-1] < width:
            refuse("norm.rotary", f"x has shape {tuple(x.shape)}; give [T, C] or [T, H, C] with C of at least {width}")
        if x.numel() == 0:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        cos_T1C = _twice(table.cos_PR, position_T)
        sin_T1C = _twice(table.sin_PR, position_T)
        heads_THC = x[..., -width:].float().view(x.shape[0], -1, width) if x.dim() == 2 else x[..., -width:].float()
        rotated_1THC = self._operators.rotate_pairs(
            heads_THC.unsqueeze(0).contiguous(),
            cos_T1C.unsqueeze(0),
            (-sin_T1C if inverse else sin_T1C).unsqueeze(0),
        )
        rotated = rotated_1THC.view(*x.shape[:-1], width).to(x.dtype)
        return torch.cat((x[..., :-width], rotated), dim=-1)


def _twice(table_PR: Tensor, position_T: Tensor) -> Tensor:
    """Return [T, 1, 2R]: each pair's value for both of its channels."""
    chosen_TR = table_PR.index_select(0, position_T)
    return chosen_TR.unsqueeze(-1).expand(-1, -1, 2).flatten(1).unsqueeze(1).contiguous()
