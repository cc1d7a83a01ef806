"""RMSNorm and rotary positions in few calls; numpy, because a call on a small tensor costs more than its arithmetic.

Legend: T rows, D width, C head width, R rotary pairs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer_cpu_ref.norm import CpuRefNorm

Floats = npt.NDArray[np.float32]

LARGEST_NUMPY = 65_536
"""Larger tensors are normalised by torch, whose kernels use every thread."""


_MOST_TABLES = 8


class _Turn(NamedTuple):
    """What one place of a table comes to; the table is held, so that its identity stays its own."""

    table: RotaryTable
    place: int
    turn_1R: npt.NDArray[np.complex64]


class QuickNorm(CpuRefNorm):
    """The readable formulas for float32; everything else goes to the readable ops."""

    def __init__(self) -> None:
        # The turns that the last step of one row needed, one for each table: every layer needs them.
        self._turns: dict[int, _Turn] = {}

    def rms(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See :meth:`NormOps.rms`."""
        if x_TD.dtype != torch.float32 or x_TD.dim() != 2 or x_TD.shape[1:] != weight_D.shape:
            return super().rms(x_TD, weight_D, eps)
        x_TD = x_TD.contiguous()
        if x_TD.numel() > LARGEST_NUMPY:
            return torch.rms_norm(x_TD, weight_D.shape, weight_D, eps)
        if x_TD.shape[0] == 1:
            square = torch.dot(x_TD[0], x_TD[0]).item() / x_TD.shape[1] + eps
            # Zero and NaN have their own ways through a division.
            if square > 0:
                return torch.mul(x_TD, 1.0 / math.sqrt(square)).mul_(weight_D)
        return torch.from_numpy(_normalised(x_TD.numpy(), weight_D.numpy(), eps))

    @np.errstate(all="ignore")
    def rotary(self, x: Tensor, table: RotaryTable, position_T: Tensor, *, inverse: bool = False) -> Tensor:
        """See :meth:`NormOps.rotary`."""
        width = table.rotary_width
        if x.dtype != torch.float32 or x.dim() not in (2, 3) or x.shape[-1] < width or x.shape[-1] % 2:
            return super().rotary(x, table, position_T, inverse=inverse)
        rotated = x.clone(memory_format=torch.contiguous_format)
        turn_TR = self._turn(table, position_T.numpy())
        if inverse:
            turn_TR = turn_TR.conj()
        # Adjacent channels are one complex number, so that a rotation is one product.
        pairs = rotated.numpy()[..., x.shape[-1] - width :].view(np.complex64)
        pairs *= turn_TR if x.dim() == 2 else turn_TR[:, None]
        return rotated

    def _turn(self, table: RotaryTable, place_T: npt.NDArray[np.int64]) -> npt.NDArray[np.complex64]:
        if len(place_T) != 1:
            return _read(table, place_T)
        place, known = int(place_T[0]), self._turns.get(id(table))
        if known is None or known.table is not table or known.place != place:
            if len(self._turns) >= _MOST_TABLES:
                self._turns.clear()
            known = self._turns[id(table)] = _Turn(table, place, _read(table, place_T))
        return known.turn_1R


@np.errstate(all="ignore")  # a row that is not finite stays so, and stays alone
def _normalised(x: Floats, weight: Floats, eps: float) -> Floats:
    square_T = np.einsum("td,td->t", x, x) / np.float32(x.shape[1]) + np.float32(eps)
    scaled: Floats = x * (np.float32(1.0) / np.sqrt(square_T))[:, None]
    scaled *= weight
    return scaled


def _read(table: RotaryTable, place_T: npt.NDArray[np.int64]) -> npt.NDArray[np.complex64]:
    turn_TR = np.empty((len(place_T), table.rotary_width // 2), dtype=np.complex64)
    turn_TR.real = table.cos_PR.numpy()[place_T]
    turn_TR.imag = table.sin_PR.numpy()[place_T]
    return turn_TR
