"""Sparse attention: window records and selected long-range records in one softmax.

Keys of a row are read through addresses: a window position is a row of this step or a slot of the ring, an entry is a
slot of the block pool, -1 is nothing. Every distinct record of a tile is decoded once, and a missing key is a row of
zeros with weight 0, so that nothing that a row does not own is ever read.

The columns of a row are cut into pieces whose results are added in a fixed order. With R2 every piece has a fixed
width, whatever the batch; a piece in which no row of a tile has a key would add exact zeros and is left out.

Legend: T rows, t rows of a tile, H heads (padded with R2), C head width, K selected entries, n keys of a piece,
u distinct records, b record bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.attention import AttentionOps, LongRange
from deepinfer_cpu_ref.codec import read_entries, read_window
from deepinfer_cpu_ref.computation import Computed, refuse, require_float, require_width
from deepinfer_cpu_ref.invariant import row_sum
from deepinfer_cpu_ref.rows import paged_slots, per_row, request_of_rows

HEAD_MULTIPLE = 16
KEY_MULTIPLE = 64
KEY_PIECE = 128

TILE_BYTES = 32 * 2**20
"""Bytes of decoded keys that one tile of rows holds at a time."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some columns of every row of a tile: keys, zero where missing, and which of them exist."""

    keys_tnC: Tensor
    exists_tn: Tensor


class CpuRefAttention(Computed, AttentionOps):
    """Two batched products per piece of keys, in tiles of rows."""

    def sparse(
        self,
        query_THC: Tensor,
        own_records_Tb: Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        sinks_H: Tensor,
        window_size: int,
        step: StepLayout,
    ) -> Tensor:
        """See :meth:`AttentionOps.sparse`."""
        _check(query_THC, own_records_Tb, window, long_range, sinks_H, window_size, step)
        if query_THC.shape[0] == 0 or step.requests == 0:
            return torch.zeros_like(query_THC, memory_format=torch.contiguous_format)
        window_T = _window_addresses(step, window, window_size)
        entries_T = None if long_range is None else _entry_slots(step, long_range)
        return self.over_records(query_THC, window_T, own_records_Tb, window, sinks_H, long_range, entries_T)

    def over_records(
        self,
        query_THC: Tensor,
        window_T: Tensor,
        own_records_Tb: Tensor,
        window: WindowCache,
        sinks_H: Tensor,
        long_range: LongRange | None = None,
        entries_T: Tensor | None = None,
    ) -> Tensor:
        """Attend with keys by address, tile by tile.

        Args:
            query_THC: rotated queries.
            window_T: int64 [T, n], a row of ``own_records_Tb``, T + slot of the ring, or -1.
            own_records_Tb: records of this step's rows.
            window: the ring.
            sinks_H: float32 [H].
            long_range: entries, or None.
            entries_T: int64 [T, K], their slots, or -1.
        """
        rows, _, width = query_THC.shape
        output_THC = torch.zeros_like(query_THC, memory_format=torch.contiguous_format)
        columns = window_T.shape[1] + (0 if entries_T is None else entries_T.shape[1])
        tile = max(1, TILE_BYTES // (columns * width * torch.finfo(self.computation.wide).bits // 8))
        for start in range(0, rows, tile):
            part = slice(start, start + tile)
            pieces = list(self._window_pieces(window_T[part], own_records_Tb, window))
            if long_range is not None and entries_T is not None:
                pieces += self._entry_pieces(entries_T[part], long_range)
            output_THC[part] = self._attend(query_THC[part], pieces, sinks_H).to(query_THC.dtype)
        return output_THC

    def _window_pieces(self, address_tn: Tensor, own_records_Tb: Tensor, window: WindowCache) -> Iterator[_Piece]:
        rows = own_records_Tb.shape[0]

        def read(address_u: Tensor) -> Tensor:
            """Addresses are ascending: rows of this step first, then ring slots."""
            from_step = address_u < rows
            own_uC = window.format.decode(own_records_Tb[address_u[from_step]])
            return torch.cat((own_uC, read_window(window, address_u[~from_step] - rows)))

        return self._pieces(address_tn, read)

    def _entry_pieces(self, slot_tK: Tensor, long_range: LongRange) -> Iterator[_Piece]:
        return self._pieces(slot_tK, lambda slot_u: read_entries(long_range.cache, slot_u))

    def _pieces(self, address_tn: Tensor, read: Callable[[Tensor], Tensor]) -> Iterator[_Piece]:
        if self.computation.invariant:
            padded = F.pad(address_tn, (0, -address_tn.shape[1] % KEY_MULTIPLE), value=-1)
            cuts = torch.split(padded, KEY_PIECE, dim=1)
        else:
            used = (address_tn >= 0).any(0).nonzero()
            cuts = (address_tn[:, : int(used[-1]) + 1],) if used.numel() else ()
        for cut_tn in cuts:
            exists_tn = cut_tn >= 0
            if bool(exists_tn.any()):
                yield _Piece(_read_distinct(cut_tn, read).to(self.computation.wide), exists_tn)

    def _attend(self, query_tHC: Tensor, pieces: list[_Piece], sinks_H: Tensor) -> Tensor:
        wide = self.computation.wide
        heads = query_tHC.shape[1]
        query_tHC = query_tHC.to(wide)
        if not pieces:
            return torch.zeros_like(query_tHC)
        sink_H1 = sinks_H.to(wide).unsqueeze(1)
        if self.computation.invariant:
            missing = -heads % HEAD_MULTIPLE
            query_tHC, sink_H1 = F.pad(query_tHC, (0, 0, 0, missing)), F.pad(sink_H1, (0, 0, 0, missing))
        query_tHC = query_tHC.contiguous()
        scores = [self._scores(query_tHC, piece) for piece in pieces]
        largest_tH1 = torch.stack([score_tHn.amax(-1, keepdim=True) for score_tHn in scores]).amax(0)
        weighted_tHC = torch.zeros_like(query_tHC)
        total_tH1 = torch.zeros_like(largest_tH1)
        for piece, score_tHn in zip(pieces, scores, strict=True):
            weight_tHn = torch.exp(score_tHn - largest_tH1)
            total_tH1 = total_tH1 + row_sum(weight_tHn)
            if self.computation.served:
                weight_tHn = weight_tHn.to(torch.bfloat16).to(wide)
            weighted_tHC = weighted_tHC + torch.bmm(weight_tHn, piece.keys_tnC)
        output_tHC = weighted_tHC / (total_tH1 + torch.exp(sink_H1 - largest_tH1))
        # Without any key the largest score is -inf and the row NaN: it has an exact value instead.
        has_key_t = torch.stack([piece.exists_tn.any(1) for piece in pieces]).any(0)
        return torch.where(has_key_t[:, None, None], output_tHC, 0.0)[:, :heads]

    def _scores(self, query_tHC: Tensor, piece: _Piece) -> Tensor:
        score_tHn = torch.bmm(query_tHC, piece.keys_tnC.transpose(1, 2)) * math.pow(query_tHC.shape[-1], -0.5)
        return score_tHn.masked_fill(~piece.exists_tn.unsqueeze(1), -math.inf)


def _window_addresses(step: StepLayout, window: WindowCache, window_size: int) -> Tensor:
    """Return int64 [T, window_size]: a row of this step, ``T + slot`` of the ring, or -1; newest position last."""
    position_T, cached_T1 = step.position_T, per_row(step.cached_R, step).unsqueeze(1)
    back = torch.arange(window_size - 1, -1, -1, device=position_T.device)
    position_Tn = position_T.unsqueeze(1) - back
    row_Tn = per_row(step.row_starts_R1[:-1], step).unsqueeze(1) + position_Tn - cached_T1
    slot_Tn = per_row(step.state_slots_R, step).unsqueeze(1) * window.ring + position_Tn % window.ring
    address_Tn = torch.where(position_Tn >= cached_T1, row_Tn, slot_Tn + step.rows)
    first_T1 = per_row(step.window_start_R, step).clamp(min=0).unsqueeze(1)
    return address_Tn.masked_fill((position_Tn < first_T1) | ~step.valid_T.unsqueeze(1), -1)


def _entry_slots(step: StepLayout, long_range: LongRange) -> Tensor:
    entries_TK = long_range.entries_TK.masked_fill(~step.valid_T.unsqueeze(1), -1)
    request_T1 = request_of_rows(step).unsqueeze(1)
    return paged_slots(step.block_table_RB, request_T1, entries_TK, long_range.cache.entries_per_block)


def _read_distinct(address_tn: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Return records [t, n, C] by address, each distinct one read once, zeros where the address is -1."""
    distinct_u, place_tn = torch.unique(address_tn, return_inverse=True)
    missing = int((distinct_u < 0).sum())
    records_uC = F.pad(read(distinct_u[missing:]), (0, 0, missing, 0))
    expanded: Tensor = records_uC[place_tn]
    return expanded


def _check(
    query_THC: Tensor,
    own_records_Tb: Tensor,
    window: WindowCache,
    long_range: LongRange | None,
    sinks_H: Tensor,
    window_size: int,
    step: StepLayout,
) -> None:
    name = "attention.sparse"
    require_float(name, "query", query_THC)
    require_width(name, "query", query_THC, window.format.width)
    require_width(name, "own records", own_records_Tb, window.format.nbytes)
    if query_THC.dim() != 3 or query_THC.shape[0] != step.rows or own_records_Tb.shape[0] != step.rows:
        refuse(
            name,
            f"queries {tuple(query_THC.shape)} and own records {tuple(own_records_Tb.shape)} do not describe "
            f"the step's {step.rows} rows",
        )
    if sinks_H.shape != query_THC.shape[1:2]:
        refuse(name, f"sinks have shape {tuple(sinks_H.shape)}; give one for each of {query_THC.shape[1]} heads")
    if not 1 <= window_size <= window.ring:
        refuse(name, f"window_size is {window_size}; it must lie between 1 and the ring of {window.ring} positions")
    if long_range is not None and long_range.cache.format.width != window.format.width:
        refuse(
            name,
            f"long-range records hold {long_range.cache.format.width} values, window records {window.format.width}",
        )
