"""RMSNorm and rotary positions.

Legend: T rows, D width, H heads, C head width, P positions, R rotary pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.ops.norm import NormOps, RotaryTable
from deepinfer_cpu_ref.computation import refuse, require_float, require_width, wide_dtype
from deepinfer_cpu_ref.invariant import mean_square


class CpuRefNorm(NormOps):
    """Statistics in at least float32, one rounding at the end; R2 by construction."""

    def rms(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See :meth:`NormOps.rms`."""
        require_float("norm.rms", "x", x_TD)
        require_width("norm.rms", "x", x_TD, weight_D.shape[0])
        wide = wide_dtype(x_TD)
        x = x_TD.to(wide)
        return (weight_D.to(wide) * x * torch.rsqrt(mean_square(x) + eps)).to(x_TD.dtype)

    def rotary(self, x: Tensor, table: RotaryTable, position_T: Tensor, *, inverse: bool = False) -> Tensor:
        """See :meth:`NormOps.rotary`."""
        require_float("norm.rotary", "x", x)
        width = table.rotary_width
        if x.dim() not in (2, 3) or x.shape[-1] < width:
            refuse("norm.rotary", f"x has shape {tuple(x.shape)}; give [T, C] or [T, H, C] with C of at least {width}")
        wide = wide_dtype(x)
        cos, sin = table.cos_PR[position_T].to(wide), table.sin_PR[position_T].to(wide)
        if inverse:
            sin = -sin
        if x.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        pairs = torch.unflatten(x[..., -width:].to(wide), -1, (-1, 2))
        even, odd = pairs[..., 0], pairs[..., 1]
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
        return torch.cat((x[..., :-width], rotated.to(x.dtype)), dim=-1)
