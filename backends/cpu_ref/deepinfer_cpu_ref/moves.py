"""Memory moves: the pools already hold the plain form, so that every move is a copy of bytes.

Legend: N blocks or slots, b bytes of one, n moved items.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.accelerator.ops.moves import MoveOps
from deepinfer_cpu_ref.computation import refuse


class CpuRefMoves(MoveOps):
    """Copies by advanced indexing, which computes offsets in 64 bits and takes any strides."""

    def copy(self, pool_Nb: Tensor, source_n: Tensor, target_n: Tensor) -> None:
        """See :meth:`MoveOps.copy`."""
        if source_n.shape != target_n.shape:
            refuse("moves.copy", f"{source_n.numel()} sources and {target_n.numel()} targets; give one target a source")
        pool_Nb[target_n] = pool_Nb[source_n]

    def zero(self, pool_Nb: Tensor, target_n: Tensor) -> None:
        """See :meth:`MoveOps.zero`."""
        pool_Nb[target_n] = 0

    def save(self, pool_Nb: Tensor, source_n: Tensor) -> Tensor:
        """See :meth:`MoveOps.save`."""
        return pool_Nb[source_n].to("cpu")

    def restore(self, pool_Nb: Tensor, target_n: Tensor, data_nb: Tensor) -> None:
        """See :meth:`MoveOps.restore`."""
        needed = (target_n.shape[0], *pool_Nb.shape[1:])
        if tuple(data_nb.shape) != needed or data_nb.dtype != pool_Nb.dtype:
            refuse(
                "moves.restore",
                f"data is {data_nb.dtype} {tuple(data_nb.shape)}; these targets need {pool_Nb.dtype} {needed}",
            )
        pool_Nb[target_n] = data_nb.to(pool_Nb.device)
