"""Op group ``moves``: the pools hold the plain form themselves, so that every move is a copy of words.

Legend: N blocks or slots, b bytes of one, n moved items.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.ops.moves import MoveOps
from deepinfer_triton.arithmetic import TritonGroup, refuse
from deepinfer_triton.item_moves import copy_items, zero_items
from deepinfer_triton.rows import as_words


class TritonMoveOps(TritonGroup, MoveOps):
    """Copies on the device; `save` and `restore` pass one contiguous tensor between device and host."""

    def copy(self, pool_Nb: Tensor, source_n: Tensor, target_n: Tensor) -> None:
        """See :meth:`MoveOps.copy`."""
        if source_n.shape != target_n.shape:
            refuse("moves.copy", f"{source_n.numel()} sources and {target_n.numel()} targets; give one target a source")
        _check_pool("moves.copy", pool_Nb)
        words = as_words(pool_Nb)
        copy_items(words.views[0], words.views[0], words.width, source_item_n=source_n, target_item_n=target_n)

    def zero(self, pool_Nb: Tensor, target_n: Tensor) -> None:
        """See :meth:`MoveOps.zero`."""
        _check_pool("moves.zero", pool_Nb)
        words = as_words(pool_Nb)
        zero_items(words.views[0], words.width, target_n)

    def save(self, pool_Nb: Tensor, source_n: Tensor) -> Tensor:
        """See :meth:`MoveOps.save`."""
        _check_pool("moves.save", pool_Nb)
        saved_nb = torch.empty((source_n.shape[0], pool_Nb.shape[1]), dtype=torch.uint8, device=pool_Nb.device)
        words = as_words(pool_Nb, saved_nb)
        copy_items(words.views[0], words.views[1], words.width, source_item_n=source_n)
        return saved_nb.to("cpu")

    def restore(self, pool_Nb: Tensor, target_n: Tensor, data_nb: Tensor) -> None:
        """See :meth:`MoveOps.restore`."""
        _check_pool("moves.restore", pool_Nb)
        needed = (target_n.shape[0], pool_Nb.shape[1])
        if tuple(data_nb.shape) != needed or data_nb.dtype != torch.uint8:
            problem = f"data is {data_nb.dtype} {tuple(data_nb.shape)}; these targets need torch.uint8 {needed}"
            refuse("moves.restore", problem)
        words = as_words(data_nb.to(pool_Nb.device).contiguous(), pool_Nb)
        copy_items(words.views[0], words.views[1], words.width, target_item_n=target_n)


def _check_pool(op_name: str, pool_Nb: Tensor) -> None:
    if pool_Nb.dtype != torch.uint8 or pool_Nb.dim() != 2 or (pool_Nb.shape[1] > 1 and pool_Nb.stride(1) != 1):
        refuse(
            op_name,
            f"the pool is {pool_Nb.dtype} {tuple(pool_Nb.shape)} with strides {pool_Nb.stride()}; give uint8 [N, b] "
            f"with consecutive bytes",
        )
