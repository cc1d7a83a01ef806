"""Sparse attention that decodes a key once for all rows that share it and multiplies in few large products.

One row a request (decode): the ring is read whole, in the order in which it lies, and what the row does not see is
turned into zero bytes before it is decoded. Several rows a request (prefill): the rows of a request share the decoded
keys of its window and entries, and each row masks what is not its own. A masked weight is an exact zero; it can do harm
only when the key is not finite, and then the readable op decides, row by row.

Legend: T rows, t rows of a tile, H heads, C head width, K selected entries, R ring, w keys in a window, e entries,
n keys, b record bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import EntryCache, WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer_cpu_ref.attention import CpuRefAttention, _check
from deepinfer_cpu_ref.computation import Computation
from deepinfer_cpu_ref.quick_codec import QuickDecoder, halves, interleaved
from deepinfer_cpu_ref.quick_row import RowAttention

TILE_BYTES = 4 * 2**20
"""Bytes of decoded keys of one tile of requests in decode: small enough for a cache."""

FEW_ROWS = 4
"""So many rows of a decode step are attended to one by one."""

TILE_ROWS = 32
"""Rows of one tile in prefill: their windows overlap but for so many keys."""

WIDEST_UNION = 4
"""Entries that a request's rows may score together, as a multiple of what each row may pick."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """Decoded keys and what a row adds to their scores: 0 where it sees the key, minus infinity where it does not."""

    keys: Tensor
    bias: Tensor


class QuickAttention(CpuRefAttention):
    """The readable softmax over shared keys, for float32; the rest goes to the readable op."""

    def __init__(self, computation: Computation) -> None:
        super().__init__(computation)
        self._decoder = QuickDecoder()
        self._row = RowAttention()

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
        result: Tensor | None = None
        if query_THC.dtype == torch.float32 and step.requests and bool(step.valid_T.all()):
            one_each = step.kind == "decode" and step.max_rows == 1 and step.rows == step.requests
            if one_each and step.rows <= FEW_ROWS:
                result = self._row_by_row(query_THC, window, long_range, sinks_H, window_size, step)
            elif one_each:
                result = self._one_row_each(query_THC, window, long_range, sinks_H, window_size, step)
            else:
                result = self._many_rows(query_THC, own_records_Tb, window, long_range, sinks_H, window_size, step)
        if result is not None:
            return result
        return super().sparse(query_THC, own_records_Tb, window, long_range, sinks_H, window_size, step)

    def _row_by_row(
        self,
        query_THC: Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        sinks_H: Tensor,
        window_size: int,
        step: StepLayout,
    ) -> Tensor | None:
        outputs: list[Tensor] = []
        for row, query_HC in enumerate(query_THC):
            output_HC = self._row.attend(query_HC, window, long_range, sinks_H, window_size, step, row)
            if output_HC is None:
                return None
            outputs.append(output_HC)
        return torch.stack(outputs)

    def _one_row_each(
        self,
        query_THC: Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        sinks_H: Tensor,
        window_size: int,
        step: StepLayout,
    ) -> Tensor | None:
        position_T = step.position_T.numpy()
        # The ring's place r holds the newest position that is r modulo its size.
        back_TR = (position_T[:, None] - np.arange(window.ring)) % window.ring
        first_T = np.maximum(step.window_start_R.numpy(), 0)
        seen_TR = (back_TR < window_size) & (position_T[:, None] - back_TR >= first_T[:, None])
        if not seen_TR.any(1).all():
            return None
        entries_TK, most = None, 0
        if long_range is not None:
            entries_TK = long_range.entries_TK.numpy()
            most = int(np.flatnonzero((entries_TK >= 0).any(0)).max(initial=-1)) + 1
        tile = max(1, TILE_BYTES // (4 * query_THC.shape[2] * (window.ring + most)))
        output_THC = torch.empty_like(query_THC, memory_format=torch.contiguous_format)
        for start in range(0, step.rows, tile):
            part = slice(start, start + tile)
            records = window.bytes_ZRb.index_select(0, step.state_slots_R[part])
            window_keys = self._window_keys(records, window, torch.from_numpy(seen_TR[part]))
            entry_keys = None
            if long_range is not None and entries_TK is not None and most:
                chosen = torch.from_numpy(np.ascontiguousarray(entries_TK[part, :most]))
                records = _entry_records(long_range.cache, step.block_table_RB[part], chosen)
                entry_keys = self._entry_keys(records, long_range.cache, chosen >= 0)
            output_THC[part] = _attend(query_THC[part], window_keys, entry_keys, sinks_H)
        return output_THC

    def _window_keys(self, records: Tensor, window: WindowCache, seen: Tensor) -> _Keys:
        records.masked_fill_(~seen.unsqueeze(-1), 0)
        return _Keys(self._decoder.window(records, window.format), _bias(seen).unsqueeze(1))

    def _entry_keys(self, records: Tensor, cache: EntryCache, seen: Tensor) -> _Keys:
        records.masked_fill_(~seen.unsqueeze(-1), 0)
        return _Keys(self._decoder.entries(records, cache.format), _bias(seen).unsqueeze(1))

    def _many_rows(
        self,
        query_THC: Tensor,
        own_records_Tb: Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        sinks_H: Tensor,
        window_size: int,
        step: StepLayout,
    ) -> Tensor | None:
        output_THC = torch.empty_like(query_THC, memory_format=torch.contiguous_format)
        starts, cached = step.row_starts_R1.tolist(), step.cached_R.tolist()
        slots, firsts = step.state_slots_R.tolist(), step.window_start_R.tolist()
        for request in range(step.requests):
            part = slice(starts[request], starts[request + 1])
            if part.start == part.stop:
                continue
            oldest = max(0, firsts[request], cached[request] - window_size + 1)
            if oldest > cached[request]:
                return None
            places = torch.arange(oldest, cached[request]) % window.ring
            history = window.bytes_ZRb[slots[request]].index_select(0, places)
            records_nb = torch.cat((history, own_records_Tb[part]))
            keys_nC = self._decoder.window(records_nb, window.format)
            entries = None
            if long_range is not None:
                entries = self._shared_entries(long_range, step.block_table_RB[request], part)
                if entries is None:
                    return None
            if not _finite(keys_nC) or (entries is not None and not _finite(entries.keys)):
                return None
            for top in range(part.start, part.stop, TILE_ROWS):
                tile = slice(top, min(part.stop, top + TILE_ROWS))
                window_keys = _tile_keys(keys_nC, step.position_T[tile].unsqueeze(1), oldest, window_size)
                entry_keys = None
                if entries is not None and long_range is not None:
                    # Early rows have picked early entries only.
                    reach = int(long_range.entries_TK[tile].max()) + 1
                    bias_tn = entries.bias[tile.start - part.start : tile.stop - part.start, :reach]
                    entry_keys = _Keys(entries.keys[:reach], bias_tn)
                output_THC[tile] = _attend_shared(query_THC[tile], window_keys, entry_keys, sinks_H)
        return output_THC

    def _shared_entries(self, long_range: LongRange, table_B: Tensor, part: slice) -> _Keys | None:
        """Return all entries that a row of the request picked, or None where they are too many to share."""
        entries_tK = long_range.entries_TK[part]
        count = int(entries_tK.max()) + 1 if entries_tK.numel() else 0
        if count > WIDEST_UNION * entries_tK.shape[1]:
            return None
        # One more column takes the places without an entry (-1).
        picked = torch.zeros((entries_tK.shape[0], count + 1), dtype=torch.bool)
        picked.scatter_(1, torch.where(entries_tK < 0, count, entries_tK), value=True)
        picked_tn = picked[:, :count]
        records = _entry_records(long_range.cache, table_B.unsqueeze(0), torch.arange(count).unsqueeze(0))[0]
        # What no row has picked may be anybody's bytes.
        records.masked_fill_(~picked_tn.any(0).unsqueeze(-1), 0)
        return _Keys(self._decoder.entries(records, long_range.cache.format), _bias(picked_tn))


def _entry_records(cache: EntryCache, table_RB: Tensor, entries_Rn: Tensor) -> Tensor:
    """Return the bytes [R, n, b] of entries; where there is none (-1), those of some other entry."""
    known = entries_Rn.clamp(min=0)
    block = table_RB.gather(1, known // cache.entries_per_block)
    pool = cache.bytes_NEb
    wide = pool.shape[2] % 8 == 0 and pool.storage_offset() % 8 == 0 and all(s % 8 == 0 for s in pool.stride()[:2])
    # The same bytes eight at a time: an index is followed once for eight of them.
    pool = pool.view(torch.int64) if wide and pool.data_ptr() % 8 == 0 else pool
    return pool[block, known % cache.entries_per_block].view(torch.uint8)


def _tile_keys(keys_nC: Tensor, position_t1: Tensor, oldest: int, window_size: int) -> _Keys:
    """Return the part of consecutive keys, the first of position ``oldest``, that the windows of a tile reach."""
    low = max(0, int(position_t1.min()) - window_size + 1 - oldest)
    high = int(position_t1.max()) + 1 - oldest
    key_n = torch.arange(oldest + low, oldest + high)
    seen_tn = (key_n <= position_t1) & (key_n > position_t1 - window_size)
    return _Keys(keys_nC[low:high], _bias(seen_tn))


def _bias(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


def _finite(keys: Tensor) -> bool:
    """A sum of finite values may overflow; that costs the quick way, not the result."""
    return math.isfinite(float(keys.sum()))


def _attend(query_tHC: Tensor, window: _Keys, entries: _Keys | None, sinks_H: Tensor) -> Tensor:
    """Attend with keys [t, n, C] of each row's own."""
    scale = query_tHC.shape[2] ** -0.5
    scores = [torch.baddbmm(window.bias, query_tHC, window.keys.transpose(1, 2), alpha=scale)]
    if entries is not None:
        scores.append(torch.baddbmm(entries.bias, halves(query_tHC), entries.keys.transpose(1, 2), alpha=scale))
    weights = _softmax(scores, sinks_H.view(1, -1, 1).expand(query_tHC.shape[0], -1, -1))
    output_tHC = torch.bmm(weights[0], window.keys)
    return output_tHC if entries is None else output_tHC + interleaved(torch.bmm(weights[1], entries.keys))


def _attend_shared(query_tHC: Tensor, window: _Keys, entries: _Keys | None, sinks_H: Tensor) -> Tensor:
    """Attend with keys [n, C] that all rows of the tile share."""
    rows, heads, width = query_tHC.shape
    query_nC = query_tHC.reshape(rows * heads, width) * width**-0.5
    scores = [(query_nC @ window.keys.t()).view(rows, heads, -1).add_(window.bias.unsqueeze(1))]
    if entries is not None:
        scores.append((halves(query_nC) @ entries.keys.t()).view(rows, heads, -1).add_(entries.bias.unsqueeze(1)))
    weights = _softmax(scores, sinks_H.view(1, -1, 1).expand(rows, -1, -1))
    output_nC = weights[0].flatten(0, 1) @ window.keys
    if entries is not None:
        output_nC += interleaved(weights[1].flatten(0, 1) @ entries.keys)
    return output_nC.view(rows, heads, width)


def _softmax(scores: list[Tensor], sinks: Tensor) -> tuple[Tensor, ...]:
    """Return the weights of each part of the keys; the sinks take their share and are left out."""
    widths = [score.shape[2] for score in scores]
    weights = torch.softmax(torch.cat((*scores, sinks), dim=2), dim=2)
    return torch.split(weights, [*widths, 1], dim=2)[:-1]
