"""FlashMLA's decode attention as a provider of ``attention.sparse``, where its records, widths and numerics are ours.

It reads wherever an index points to, so indices are made here: exactly -1 for what a row must not see, and never beyond
the pool. Its schedule depends on the lengths as well as on shapes and is not checked: every call gets a new one.
What it cannot compute (prefill, other formats, portable numerics, other widths) stays with our kernels.

Legend: T rows, H heads, C head width, n window positions, K selected entries, Z state slots, R ring positions,
N blocks, E entries of a block, b record bytes.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import EntryCache, WindowCache
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.attention import AttentionOps, LongRange
from deepinfer.numerics import LongRangeRecord, WindowRecord

WIDTH: Final = 512
HEADS: Final = (64, 128)
NOTHING: Final = -1
"""The only index that it skips; every other one is read."""


class FlashMlaAttention(AttentionOps):
    """Decode steps by the library, everything else by our own kernels."""

    def __init__(self, library: Any, options: OpOptions, own: AttentionOps) -> None:
        self._library = library
        self._options = options
        self._own = own

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
        if not self._can_serve(query_THC, window, long_range, step):
            return self._own.sparse(query_THC, own_records_Tb, window, long_range, sinks_H, window_size, step)
        places_Tn = window_places(window, window_size, step)
        named: dict[str, Any] = {}
        seen_T = (places_Tn != NOTHING).any(1)
        if long_range is not None:
            entries_TK = entry_places(long_range.cache, long_range.entries_TK, step)
            seen_T = seen_T | (entries_TK != NOTHING).any(1)
            named = {
                "extra_k_cache": long_range.cache.bytes_NEb.unsqueeze(2),
                "extra_indices_in_kvcache": entries_TK.unsqueeze(1),
                "extra_topk_length": _lengths(entries_TK),
            }
        out_TsHC, _ = self._library.flash_mla_with_kvcache(
            q=query_THC.unsqueeze(1).contiguous(),
            k_cache=window.bytes_ZRb.unsqueeze(2),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=WIDTH,
            sched_meta=self._library.get_mla_metadata(),
            softmax_scale=math.pow(WIDTH, -0.5),
            indices=places_Tn.unsqueeze(1),
            attn_sink=sinks_H.to(torch.float32).contiguous(),
            topk_length=_lengths(places_Tn),
            enable_batch_invariant=self._options.batch_invariant,
            **named,
        )
        # A row without a key is ours to define.
        return torch.where(seen_T[:, None, None], out_TsHC.squeeze(1), 0.0)

    def _can_serve(
        self, query_THC: Tensor, window: WindowCache, long_range: LongRange | None, step: StepLayout
    ) -> bool:
        rows, heads, width = query_THC.shape
        return (
            step.kind == "decode"
            and rows > 0
            and width == WIDTH
            and heads in HEADS
            and query_THC.dtype == torch.bfloat16
            and self._options.numerics == "served"
            and isinstance(window.format, WindowRecord)
            and (long_range is None or isinstance(long_range.cache.format, LongRangeRecord))
        )


class _Row(NamedTuple):
    """What is known of each row's request."""

    slot_T1: Tensor
    first_T1: Tensor
    newest_T1: Tensor
    valid_T1: Tensor


def _rows(step: StepLayout) -> _Row:
    def of_row(values_R: Tensor) -> Tensor:
        return values_R.index_select(0, step.request_T).unsqueeze(1)

    return _Row(
        of_row(step.state_slots_R), of_row(step.window_start_R), step.position_T.unsqueeze(1), step.valid_T.unsqueeze(1)
    )


def window_places(window: WindowCache, window_size: int, step: StepLayout) -> Tensor:
    """Return int32 [T, n]: ``slot * R + position % R`` of each position in a row's window, or -1."""
    row = _rows(step)
    slots, ring = window.bytes_ZRb.shape[:2]
    back_n = torch.arange(window_size - 1, -1, -1, device=step.position_T.device)
    position_Tn = row.newest_T1 - back_n
    inside_Tn = row.valid_T1 & (position_Tn >= row.first_T1) & (position_Tn >= 0)
    inside_Tn = inside_Tn & (row.slot_T1 >= 0) & (row.slot_T1 < slots)
    return torch.where(inside_Tn, row.slot_T1 * ring + position_Tn % ring, NOTHING).to(torch.int32)


def entry_places(cache: EntryCache, entries_TK: Tensor, step: StepLayout) -> Tensor:
    """Return int32 [T, K]: ``block * E + offset`` of each selected entry, or -1; nothing beyond a table or the pool."""
    row = _rows(step)
    blocks, per_block = cache.bytes_NEb.shape[:2]
    table_RB = step.block_table_RB
    outer_TK = torch.div(entries_TK, per_block, rounding_mode="floor")
    visible_T1 = torch.div(row.newest_T1 + 1, cache.ratio, rounding_mode="floor")
    inside_TK = row.valid_T1 & (entries_TK >= 0) & (entries_TK < visible_T1) & (outer_TK < table_RB.shape[1])
    table_TB = table_RB.index_select(0, step.request_T)
    block_TK = table_TB.gather(1, torch.where(inside_TK, outer_TK, 0))
    inside_TK = inside_TK & (block_TK >= 0) & (block_TK < blocks)
    return torch.where(inside_TK, block_TK * per_block + entries_TK % per_block, NOTHING).to(torch.int32)


def _lengths(places_Tn: Tensor) -> Tensor:
    """Return int32 [T], the place behind the last index that is none to skip."""
    count = torch.arange(1, places_Tn.shape[1] + 1, device=places_Tn.device)
    return torch.where(places_Tn != NOTHING, count, 0).amax(1).to(torch.int32)
