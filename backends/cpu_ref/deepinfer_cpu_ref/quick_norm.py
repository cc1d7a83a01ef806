"""RMSNorm and rotary positions in few calls; numpy, because a call on a small tensor costs more than its arithmetic.

Legend: T rows, D width, C head width, R rotary pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer_cpu_ref.norm import CpuRefNorm

LARGEST_NUMPY = 65_536
"""Larger tensors are normalised by torch, whose kernels use every thread."""


class QuickNorm(CpuRefNorm):
    """The readable formulas for float32; everything else goes to the readable ops."""

    @np.errstate(all="ignore")  # a row that is not finite stays so, and stays alone
    def rms(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See :meth:`NormOps.rms`."""
        if x_TD.dtype != torch.float32 or x_TD.dim() != 2 or x_TD.shape[1:] != weight_D.shape:
            return super().rms(x_TD, weight_D, eps)
        x_TD = x_TD.contiguous()
        if x_TD.numel() > LARGEST_NUMPY:
            return torch.rms_norm(x_TD, weight_D.shape, weight_D, eps)
        x = x_TD.numpy()
        square_T = np.einsum("td,td->t", x, x) / np.float32(x.shape[1]) + np.float32(eps)
        scaled = x * (np.float32(1.0) / np.sqrt(square_T))[:, None]
        scaled *= weight_D.numpy()
        return torch.from_numpy(scaled)

    @np.errstate(all="ignore")
    def rotary(self, x: Tensor, table: RotaryTable, position_T: Tensor, *, inverse: bool = False) -> Tensor:
        """See :meth:`NormOps.rotary`."""
        width = table.rotary_width
        if x.dtype != torch.float32 or x.dim() not in (2, 3) or x.shape[-1] < width or x.shape[-1] % 2:
            return super().rotary(x, table, position_T, inverse=inverse)
        rotated = x.clone(memory_format=torch.contiguous_format)
        place_T = position_T.numpy()
        turn_TR = np.empty((place_T.shape[0], width // 2), dtype=np.complex64)
        turn_TR.real = table.cos_PR.numpy()[place_T]
        sin_TR = table.sin_PR.numpy()[place_T]
        turn_TR.imag = -sin_TR if inverse else sin_TR
        # Adjacent channels are one complex number, so that a rotation is one product.
        pairs = rotated.numpy()[..., x.shape[-1] - width :].view(np.complex64)
        pairs *= turn_TR if x.dim() == 2 else turn_TR[:, None]
        return rotated
