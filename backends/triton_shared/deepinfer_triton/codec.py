"""Op group ``codec``: encode, store by slot, gather and decode.

Legend: T rows, C record width, b record bytes, n gathered slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.caches import EntryCache, IndexCache, WindowCache
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.numerics import RecordFormat
from deepinfer_triton.arithmetic import TritonGroup, refuse, require_width
from deepinfer_triton.item_moves import copy_items
from deepinfer_triton.record_layout import entry_places, index_places, row_places, window_places
from deepinfer_triton.record_reading import read_records
from deepinfer_triton.record_writing import write_records
from deepinfer_triton.rows import as_words


class TritonCodecOps(TritonGroup, CodecOps):
    """The pools hold the byte layout of `deepinfer.numerics.records` itself; R2 because every row is one program."""

    def encode(self, x_TC: Tensor, record_format: RecordFormat) -> Tensor:
        """See :meth:`CodecOps.encode`."""
        records_Tb = torch.empty((x_TC.shape[0], record_format.nbytes), dtype=torch.uint8, device=x_TC.device)
        places = row_places("codec.encode", records_Tb, record_format)
        write_records("codec.encode", x_TC, record_format, places, None)
        return records_Tb

    def store_window(self, cache: WindowCache, records_Tb: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_window`."""
        require_width("codec.store_window", "records", records_Tb, cache.format.nbytes)
        pool = cache.bytes_ZRb
        if pool.stride(-1) != 1 or records_Tb.dtype != torch.uint8:
            problem = f"records are {records_Tb.dtype} and the ring has strides {pool.stride()}"
            refuse("codec.store_window", f"{problem}; give uint8 records and a ring of consecutive bytes")
        words = as_words(records_Tb.contiguous(), pool)
        copy_items(words.views[0], words.views[1], words.width, target_item_n=slot_T)

    def store_entries(self, cache: EntryCache, x_TC: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_entries`."""
        write_records("codec.store_entries", x_TC, cache.format, entry_places("codec.store_entries", cache), slot_T)

    def store_index_keys(self, cache: IndexCache, x_TC: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_index_keys`."""
        places = index_places("codec.store_index_keys", cache)
        write_records("codec.store_index_keys", x_TC, cache.format, places, slot_T)

    def gather_window(self, cache: WindowCache, slot_n: Tensor) -> Tensor:
        """See :meth:`CodecOps.gather_window`."""
        places = window_places("codec.gather_window", cache)
        return read_records("codec.gather_window", cache.format, places, slot_n)

    def gather_entries(self, cache: EntryCache, slot_n: Tensor) -> Tensor:
        """See :meth:`CodecOps.gather_entries`."""
        places = entry_places("codec.gather_entries", cache)
        return read_records("codec.gather_entries", cache.format, places, slot_n)

    def gather_index_keys(self, cache: IndexCache, slot_n: Tensor) -> Tensor:
        """See :meth:`CodecOps.gather_index_keys`."""
        places = index_places("codec.gather_index_keys", cache)
        return read_records("codec.gather_index_keys", cache.format, places, slot_n)
