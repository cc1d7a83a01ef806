"""Normalisation and rotary position ops.

Legend: T rows, D width, H heads, C head width, P positions, R rotary pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines built once on the host, so that every driver shares their bits (model.md section 4).

    Attributes:
        cos_PR: float32 [P, rd/2] on the device; row p belongs to position p.
        sin_PR: float32 [P, rd/2].
    """

    cos_PR: torch.Tensor
    sin_PR: torch.Tensor

    @property
    def rotary_width(self) -> int:
        """rd, the number of trailing channels that are rotated."""
        return 2 * int(self.cos_PR.shape[1])


class NormOps(OpGroup):
    """RMSNorm and rotary embedding."""

    group = "norm"

    @op
    def rms(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``weight * x * rsqrt(mean(x^2) + eps)`` over the last dimension, in x's dtype.

        The statistic and the product are computed in at least float32 and rounded once. With eps = 1e-20 a zero
        row gives exact zeros. ``weight_D`` is float32. Leading dimensions are free. NaN stays in its row.
        """
        not_implemented(self, "rms")

    @op
    def rotary(
        self, x: torch.Tensor, table: RotaryTable, position_T: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """Rotate the last ``rd`` channels of x [T, C] or [T, H, C] by each row's position; return a new tensor.

        Pairs are adjacent channels (interleaved): ``e' = e*c - o*s; o' = o*c + e*s`` with c, s from the table; the
        inverse uses -s. Computed in at least float32, rounded once to x's dtype. Other channels are copied.
        ``position_T`` is int64; a position outside the table is the caller's fault.
        """
        not_implemented(self, "rotary")
