"""Norms and rotation of the trainer's forward pass (docs of the mathematics: ``deepinfer.model``).

Legend: B sequences, T positions, C width, R rotary pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.ops.norm import RotaryTable


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Rotation:
    """One rotary table as unit complex numbers."""

    def __init__(self, table: RotaryTable) -> None:
        self._turns_PR = torch.complex(table.cos_PR, table.sin_PR)

    def __call__(self, x: Tensor, position_T: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate the last channels of ``x`` [B, T, C] or [B, T, H, C] by the positions [T] or [B, T]."""
        turns = self._turns_PR[position_T]
        if inverse:
            turns = turns.conj()
        if x.dim() - 1 > position_T.dim() + (1 if position_T.dim() == 1 else 0):
            turns = turns.unsqueeze(-2)
        width = 2 * turns.shape[-1]
        pairs = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous())
        rotated = torch.view_as_real(pairs * turns).flatten(-2)
        return torch.cat((x[..., :-width], rotated), -1)
