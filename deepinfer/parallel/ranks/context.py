"""A prompt step split over the ranks of a context group: each computes its rows, and every one stores them all.

Its two pieces of each request's chunk stand in a rank's layout as two requests. What lies before a piece in the chunk
other ranks have computed: their window records fill a ring of the piece's own before its attention, and long-range
entries are made of all rows everywhere. Padding rows make the ranks' rows equally many; each is a request of one row
that is not valid, with block table [0].

Legend: T rows of the step, K rows of a rank, R requests of the step, P of a rank's layout, B blocks of a table,
n rows that lie before a piece, Z and R state slots and ring positions of a window cache, b bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.accelerator import Collectives
from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.upload import on_device
from deepinfer.parallel.context import mirrored_pieces, piece_rows

_ROW_TABLE = 0
"""The block of a padding row, which no request ever owns."""


class SplitContext:
    """The prompts of a context group: all its ranks have the same requests, and share the rows of prompt steps."""

    def __init__(self, group: Collectives) -> None:
        """Share rows among the ranks of ``group``, a group between devices."""
        self._group = group

    def share(self, step: StepLayout) -> SplitStep:
        """Return this rank's share of a prompt step; nothing is exchanged yet."""
        starts_R1, cached_R = step.row_starts_R1.cpu().numpy(), step.cached_R.cpu().numpy()
        size, rank = self._group.world_size, self._group.rank
        counts_R = np.diff(starts_R1)
        rows = sum(2 * piece_rows(count, size) for count in counts_R.tolist())
        order_T = np.empty(starts_R1[-1], np.int64)
        for other in range(size):
            row_k = _rows_of(_pieces_of(counts_R, size, other), starts_R1)
            order_T[row_k] = other * rows + np.arange(len(row_k))
        pieces = _pieces_of(counts_R, size, rank)
        row_k = _rows_of(pieces, starts_R1)
        padding = rows - len(row_k)
        device = step.position_T.device

        def moved(values: NDArray[np.int64]) -> Tensor:
            return on_device(values, device)

        row_n, slot_n = _before(pieces, starts_R1, cached_R, step.ring)
        return SplitStep(
            group=self._group,
            step=_layout(step, pieces, moved(row_k), cached_R, padding),
            padding=padding,
            row_k=moved(row_k),
            order_T=moved(order_T),
            slot_p=step.state_slots_R[moved(np.array([piece.request for piece in pieces], np.int64))],
            before_row_n=moved(row_n),
            before_slot_n=moved(slot_n),
        )


@dataclass(frozen=True, slots=True)
class SplitStep:
    """One rank's share of a prompt step.

    Attributes:
        group: the ranks that share it.
        step: the layout of this rank's rows.
        padding: how many of them, the last ones, are padding.
        row_k: int64, the others' rows in the whole step.
        order_T: int64 [T], where each row of the whole step lies among the gathered rows of all ranks.
        slot_p: int64, the state slot of each piece's request.
        before_row_n, before_slot_n: rows of the whole step that lie before a piece, within its ring, and where in the
            rings of all pieces they belong.
    """

    group: Collectives
    step: StepLayout
    padding: int
    row_k: Tensor
    order_T: Tensor
    slot_p: Tensor
    before_row_n: Tensor
    before_slot_n: Tensor

    def own(self, values_T: Tensor, padding: float = 0) -> Tensor:
        """Return this rank's rows of a tensor; rows of padding hold ``padding``."""
        own_k = values_T.index_select(0, self.row_k)
        if not self.padding:
            return own_k
        return torch.cat([own_k, own_k.new_full((self.padding, *own_k.shape[1:]), padding)])

    def whole(self, values_K: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the whole step; every rank of the group calls it together."""
        rows = values_K.shape[0]
        bytes_Kb = values_K.contiguous().view(torch.uint8).view(rows, -1)
        gathered = self.group.all_gather(bytes_Kb).flatten(0, 1).index_select(0, self.order_T)
        return gathered.view(values_K.dtype).view(-1, *values_K.shape[1:])

    def window_before(self, window: WindowCache, records_Tb: Tensor, ops: Ops) -> WindowCache:
        """Return rings of this rank's pieces, which hold what lies before each.

        Args:
            window: the layer's own; it holds what lies before the step.
            records_Tb: window records of all rows of the step.
            ops: the plan's ops.
        """
        rings = window.bytes_ZRb.index_select(0, self.slot_p)
        if self.padding:
            rings = torch.cat([rings, rings.new_zeros((1, *rings.shape[1:]))])
        pieces = WindowCache(rings, window.format)
        if len(self.before_row_n):
            ops.codec.store_window(pieces, records_Tb.index_select(0, self.before_row_n), self.before_slot_n)
        return pieces


class _Piece(NamedTuple):
    """Rows of one request's chunk, counted from the chunk's first."""

    request: int
    rows: range


def _pieces_of(counts_R: NDArray[np.int64], size: int, rank: int) -> list[_Piece]:
    return [
        _Piece(request, rows)
        for request, count in enumerate(counts_R.tolist())
        for rows in mirrored_pieces(count, size, rank)
        if rows
    ]


def _rows_of(pieces: list[_Piece], starts_R1: NDArray[np.int64]) -> NDArray[np.int64]:
    parts = [starts_R1[request] + np.arange(rows.start, rows.stop) for request, rows in pieces]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _before(
    pieces: list[_Piece], starts_R1: NDArray[np.int64], cached_R: NDArray[np.int64], ring: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for number, (request, own) in enumerate(pieces):
        offsets = np.arange(max(0, own.start - ring), own.start)
        rows.append(starts_R1[request] + offsets)
        slots.append(number * ring + (cached_R[request] + offsets) % ring)
    return np.concatenate(rows), np.concatenate(slots)


def _layout(
    step: StepLayout, pieces: list[_Piece], row_k: Tensor, cached_R: NDArray[np.int64], padding: int
) -> StepLayout:
    device = step.position_T.device
    lengths = [len(piece.rows) for piece in pieces] + [1] * padding
    requests = [piece.request for piece in pieces]

    def numbers(values: list[int]) -> Tensor:
        return on_device(np.array(values, np.int64), device)

    def padded(values: Tensor, fill: float) -> Tensor:
        return torch.cat([values, values.new_full((padding, *values.shape[1:]), fill)]) if padding else values

    request_p = numbers(requests)
    cached = [int(cached_R[request]) + rows.start for request, rows in pieces] + [0] * padding
    return replace(
        step,
        row_starts_R1=numbers([0, *np.cumsum(lengths).tolist()]),
        cached_R=numbers(cached),
        state_slots_R=numbers([*range(len(pieces)), *[len(pieces)] * padding]),
        block_table_RB=padded(step.block_table_RB.index_select(0, request_p), _ROW_TABLE),
        request_T=torch.repeat_interleave(torch.arange(len(lengths), device=device), numbers(lengths)),
        position_T=padded(step.position_T.index_select(0, row_k), 0),
        window_start_R=padded(step.window_start_R.index_select(0, request_p), 0),
        image_T=padded(step.image_T.index_select(0, row_k), fill=False),
        valid_T=padded(step.valid_T.index_select(0, row_k), fill=False),
        max_rows=max(lengths),
    )
