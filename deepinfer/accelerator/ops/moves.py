"""Memory moves: whole blocks and state slots of the byte pools.

Legend: N blocks or slots, b bytes of one, n moved items.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op


class MoveOps(OpGroup):
    """Copies within a pool and between a pool and plain host tensors. Indices are int64 on the device.

    The plain form of an item is its byte layout of model.md section 11; a driver with another layout converts
    exactly, so that ``restore(save(x))`` and a save on one driver restored on another keep every decoded record.
    """

    group = "moves"

    @op
    def copy(self, pool_Nb: torch.Tensor, source_n: torch.Tensor, target_n: torch.Tensor) -> None:
        """Copy items in place; targets are distinct and none is also a source."""
        not_implemented(self, "copy")

    @op
    def zero(self, pool_Nb: torch.Tensor, target_n: torch.Tensor) -> None:
        """Fill items with zero bytes, in place."""
        not_implemented(self, "zero")

    @op
    def save(self, pool_Nb: torch.Tensor, source_n: torch.Tensor) -> torch.Tensor:
        """Return uint8 [n, b] on the host in the plain form."""
        not_implemented(self, "save")

    @op
    def restore(self, pool_Nb: torch.Tensor, target_n: torch.Tensor, data_nb: torch.Tensor) -> None:
        """Write items saved by :meth:`save`, in place."""
        not_implemented(self, "restore")
