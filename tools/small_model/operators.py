"""Norms and rotation of the trainer's forward pass (docs of the mathematics: ``deepinfer.model``).

Legend: B sequences, T positions, C width, R rotary pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.ops.norm import RotaryTable


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return one over the root of the mean square of the last dimension, which stays with size 1."""
    # The norm reads the values once; squaring them first would write them all again, forwards and backwards.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.rsqrt(norm.square() / x.shape[-1] + eps)


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
        pairs = torch.view_as_complex(torch.unflatten(x[..., -width:], -1, (-1, 2)).contiguous())
        rotated = torch.view_as_real(pairs * turns).flatten(-2)
        return torch.cat((x[..., :-width], rotated), -1)
