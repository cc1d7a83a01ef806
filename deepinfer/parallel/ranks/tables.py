"""N-gram tables spread over the host memory of all ranks, and the rows of a step fetched from there.

Each table is cut into as many consecutive shares as there are ranks. A step's rows depend on its ids only, so those of
all layers are fetched at once, before the first layer runs: how many rows go where, their numbers, the rows. Every rank
makes the three exchanges in every step, whether or not it has rows. A row is asked for once, however often the step
reads it.

Legend: T rows of a step, F hash columns, R ranks, n rows that are fetched, b bytes of a table row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.accelerator import Collectives
from deepinfer.accelerator.ops.memory import NgramTable


class SpreadTables:
    """This rank's side of tables that all ranks of a group hold together."""

    def __init__(self, group: Collectives) -> None:
        """Share tables among the ranks of ``group``, a group between hosts."""
        self._group = group

    def share(self, table: NgramTable) -> NgramTable:
        """Return the rows of a table that this rank holds; a view, so that it touches no others."""
        size = share_rows(table.rows_RW.shape[0], self._group.world_size)
        own = slice(self._group.rank * size, (self._group.rank + 1) * size)
        return NgramTable(table.name, table.rows_RW[own], None if table.scales is None else table.scales[own])

    def fetch(
        self, shares: Sequence[NgramTable], num_rows: Sequence[int], rows_TF: Sequence[Tensor]
    ) -> list[tuple[NgramTable, Tensor]]:
        """Return for each table a small one of the rows that are read, and the numbers of the rows in it.

        Every rank of the group calls it together, with the same tables in the same order.

        Args:
            shares: what :meth:`share` gave of each table.
            num_rows: rows of each whole table.
            rows_TF: int64 [T, F] rows of each whole table that this rank's step reads, -1 for none.
        """
        found = [_distinct(rows) for rows in rows_TF]
        table_n = _numbered([row_n for row_n, _ in found])
        row_n = torch.cat([row_n for row_n, _ in found])
        sizes = torch.tensor([share_rows(rows, self._group.world_size) for rows in num_rows], dtype=torch.int64)
        owner_n = row_n // sizes[table_n]
        order_n = torch.argsort(owner_n, stable=True)
        asked_n2 = torch.stack([table_n, row_n - owner_n * sizes[table_n]], dim=1)[order_n]
        send_R = torch.bincount(owner_n, minlength=self._group.world_size)
        counts_RR = self._group.all_gather(send_R)
        send, receive = send_R.tolist(), counts_RR[:, self._group.rank].tolist()
        due_n2 = self._group.all_to_all(asked_n2, send, receive)
        bytes_nb = self._group.all_to_all(_read(shares, due_n2), receive, send)
        # Owners hold consecutive rows, so each table's rows still ascend: they lie as its distinct rows do.
        sent_table_n = table_n[order_n]
        return [
            (_small_table(share, bytes_nb[sent_table_n == number]), number_TF)
            for number, (share, (_, number_TF)) in enumerate(zip(shares, found, strict=True))
        ]


def share_rows(rows: int, ranks: int) -> int:
    """Return how many rows of a table a rank holds at most; the last ones may hold fewer."""
    return -(-rows // ranks)


def _distinct(rows_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that are read, ascending, and for each place the number of its row among them, or -1."""
    on_host_TF = rows_TF.cpu()
    is_read_TF = on_host_TF >= 0
    row_n, number_m = torch.unique(on_host_TF[is_read_TF], return_inverse=True)
    number_TF = torch.full_like(on_host_TF, -1)
    number_TF[is_read_TF] = number_m
    return row_n, number_TF.to(rows_TF.device)


def _numbered(rows: Sequence[Tensor]) -> Tensor:
    """Return for each row of the concatenation whose it is."""
    lengths = torch.tensor([len(row_n) for row_n in rows], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(rows)), lengths)


def _read(shares: Sequence[NgramTable], due_n2: Tensor) -> Tensor:
    """Return the bytes [n, b] of rows of this rank's shares; scales stand behind the values."""
    widths = {sum(part.shape[1] for part in _parts(share)) for share in shares}
    bytes_nb = torch.empty((len(due_n2), max(widths)), dtype=torch.uint8)
    for number, share in enumerate(shares):
        (place_m,) = (due_n2[:, 0] == number).nonzero(as_tuple=True)
        parts = [part.index_select(0, due_n2[place_m, 1]) for part in _parts(share)]
        bytes_nb[place_m, : sum(part.shape[1] for part in parts)] = torch.cat(parts, dim=1)
    return bytes_nb


def _small_table(share: NgramTable, bytes_nb: Tensor) -> NgramTable:
    """Return fetched rows as a table of the share's form; one row of zeros where nothing was read."""
    if not len(bytes_nb):
        bytes_nb = bytes_nb.new_zeros((1, bytes_nb.shape[1]))
    widths = [part.shape[1] for part in _parts(share)]
    pieces = torch.split(bytes_nb[:, : sum(widths)], widths, dim=1)
    values = pieces[0].contiguous().view(share.rows_RW.dtype)
    scales = None if share.scales is None else pieces[1].contiguous().view(share.scales.dtype)
    return NgramTable(share.name, values, scales)


def _parts(table: NgramTable) -> list[Tensor]:
    """Return values and scales as bytes, a row each."""
    return [part.view(torch.uint8) for part in (table.rows_RW, table.scales) if part is not None]
