"""Records into the window ring, and whole blocks and slots between pool and host.

Legend: T rows, Z state slots, R ring positions, N items of a pool, b bytes, n moved items.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.accelerator.ops.moves import MoveOps
from deepinfer_ascend.arithmetic import refuse, require_width
from deepinfer_ascend.operators import Operators


class NativeCodec(CodecOps):
    """The window store; the record formats themselves have no operator in torch-npu."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def store_window(self, cache: WindowCache, records_Tb: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_window`."""
        require_width("codec.store_window", "records", records_Tb, cache.format.nbytes)
        if records_Tb.shape[0] == 0 or cache.bytes_ZRb.numel() == 0:
            return
        pool_nb, slot_pitch = contiguous_rows(cache.bytes_ZRb)
        place_T = torch.div(slot_T, cache.ring, rounding_mode="floor") * slot_pitch + slot_T % cache.ring
        place_T, rows_Tb = without_gaps(pool_nb, place_T, records_Tb, slot_T >= 0)
        self._operators.scatter_rows(pool_nb, place_T, rows_Tb)


def contiguous_rows(cache_ZRb: Tensor) -> tuple[Tensor, int]:
    """Return a contiguous matrix of records that lies on the cache's memory, and rows from one slot to the next.

    The layers of one pool interleave, so that a layer's view has a pitch. The pool's pitch is a multiple of the
    record: rows of the pool, counted from the layer's first record, form a dense matrix whose other rows belong to
    other layers and are never addressed. An operator that wants dense memory then need not copy the pool.
    """
    slots, ring, nbytes = cache_ZRb.shape
    pitch, row, byte = cache_ZRb.stride()
    if byte != 1 or row != nbytes or (slots > 1 and pitch % nbytes):
        refuse(
            "codec.store_window",
            f"the ring has strides {cache_ZRb.stride()}; records of {nbytes} bytes must lie side by side and slots "
            f"a multiple of {nbytes} bytes apart",
        )
    slot_pitch = pitch // nbytes if slots > 1 else ring
    rows = (slots - 1) * slot_pitch + ring
    return cache_ZRb.as_strided((rows, nbytes), (nbytes, 1), cache_ZRb.storage_offset()), slot_pitch


def without_gaps(pool_nb: Tensor, place_T: Tensor, rows_Tb: Tensor, stored_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return places and rows of which all are written, without waiting for the device.

    A row that is not to be stored repeats one that is, place and bytes alike; when none is, it rewrites the pool's
    first row with what that holds.
    """
    first_1 = stored_T.to(torch.int32).argmax(dim=0, keepdim=True)
    any_1 = stored_T.any(dim=0, keepdim=True)
    spare_place = torch.where(any_1, place_T.index_select(0, first_1), 0)
    spare_row = torch.where(any_1.unsqueeze(-1), rows_Tb.index_select(0, first_1), pool_nb[:1])
    return torch.where(stored_T, place_T, spare_place), torch.where(stored_T.unsqueeze(-1), rows_Tb, spare_row)


class NativeMoves(MoveOps):
    """One copy an item: no kernel has to address a pool of more than 2^31 bytes, and no format is in the way.

    Indices are read by the host, so that these ops wait for the device; none of them runs inside a step.
    """

    def copy(self, pool_Nb: Tensor, source_n: Tensor, target_n: Tensor) -> None:
        """See :meth:`MoveOps.copy`."""
        if source_n.shape != target_n.shape:
            refuse("moves.copy", f"{source_n.numel()} sources and {target_n.numel()} targets; give one target a source")
        for source, target in zip(source_n.tolist(), target_n.tolist(), strict=True):
            pool_Nb[target].copy_(pool_Nb[source])

    def zero(self, pool_Nb: Tensor, target_n: Tensor) -> None:
        """See :meth:`MoveOps.zero`."""
        for target in target_n.tolist():
            pool_Nb[target].zero_()

    def save(self, pool_Nb: Tensor, source_n: Tensor) -> Tensor:
        """See :meth:`MoveOps.save`."""
        saved = torch.empty((source_n.shape[0], *pool_Nb.shape[1:]), dtype=pool_Nb.dtype)
        for index, source in enumerate(source_n.tolist()):
            saved[index].copy_(pool_Nb[source])
        return saved

    def restore(self, pool_Nb: Tensor, target_n: Tensor, data_nb: Tensor) -> None:
        """See :meth:`MoveOps.restore`."""
        needed = (target_n.shape[0], *pool_Nb.shape[1:])
        if tuple(data_nb.shape) != needed or data_nb.dtype != pool_Nb.dtype:
            refuse(
                "moves.restore",
                f"data is {data_nb.dtype} {tuple(data_nb.shape)}; these targets need {pool_Nb.dtype} {needed}",
            )
        for index, target in enumerate(target_n.tolist()):
            pool_Nb[target].copy_(data_nb[index])
