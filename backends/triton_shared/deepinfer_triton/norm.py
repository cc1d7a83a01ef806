"""Op group ``norm``: RMSNorm and rotary positions.

Legend: T rows, D width.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.accelerator.ops.norm import NormOps, RotaryTable
from deepinfer_triton.arithmetic import TritonGroup
from deepinfer_triton.rms_norm import rms_norm
from deepinfer_triton.rotary import rotary


class TritonNormOps(TritonGroup, NormOps):
    """Statistics in float32, one rounding at the end; R2 because every row is one program."""

    def rms(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See :meth:`NormOps.rms`."""
        return rms_norm(x_TD, weight_D, eps)

    def rotary(self, x: Tensor, table: RotaryTable, position_T: Tensor, *, inverse: bool = False) -> Tensor:
        """See :meth:`NormOps.rotary`."""
        return rotary(x, table, position_T, inverse=inverse)
