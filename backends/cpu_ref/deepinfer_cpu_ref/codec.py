"""Record codecs: encode, store by slot, gather and decode.

The pools hold the byte layout of `deepinfer.numerics.records` itself, so that all of this is addressing.

Legend: T rows, C record width, b record bytes, n gathered slots, Z state slots, R ring, N blocks, E entries per block.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.accelerator.caches import EntryCache, IndexCache, WindowCache
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.numerics import RecordFormat, RecordParts
from deepinfer_cpu_ref.computation import refuse, require_float, require_width


def read_window(cache: WindowCache, slot_n: Tensor) -> Tensor:
    """Return decoded float32 records [n, C] of slots that all exist."""
    return cache.format.decode(cache.bytes_ZRb[slot_n // cache.ring, slot_n % cache.ring])


def read_entries(cache: EntryCache, slot_n: Tensor) -> Tensor:
    """Return decoded float32 records [n, C] of slots that all exist."""
    entries = cache.entries_per_block
    return cache.format.decode(cache.bytes_NEb[slot_n // entries, slot_n % entries])


def read_index_keys(cache: IndexCache, slot_n: Tensor) -> Tensor:
    """Return decoded float32 index keys [n, C] of slots that all exist."""
    sections = _index_sections(cache)
    block, offset = slot_n // cache.entries_per_block, slot_n % cache.entries_per_block
    return cache.format.decode_parts(RecordParts(sections.data[block, offset], sections.scales[block, offset]))


def _index_sections(cache: IndexCache) -> RecordParts:
    used_bytes = cache.entries_per_block * cache.format.nbytes
    return cache.format.block_sections(cache.bytes_Nb[:, :used_bytes], cache.entries_per_block)


class CpuRefCodec(CodecOps):
    """Bytes by `deepinfer.numerics`, addresses by advanced indexing in 64 bits; R2 because every row stands alone."""

    def encode(self, x_TC: Tensor, record_format: RecordFormat) -> Tensor:
        """See :meth:`CodecOps.encode`."""
        _check_rows("codec.encode", x_TC, record_format)
        return record_format.encode(x_TC)

    def store_window(self, cache: WindowCache, records_Tb: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_window`."""
        require_width("codec.store_window", "records", records_Tb, cache.format.nbytes)
        stored = slot_T >= 0
        slot = slot_T[stored]
        cache.bytes_ZRb[slot // cache.ring, slot % cache.ring] = records_Tb[stored]

    def store_entries(self, cache: EntryCache, x_TC: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_entries`."""
        _check_rows("codec.store_entries", x_TC, cache.format)
        stored = slot_T >= 0
        slot, entries = slot_T[stored], cache.entries_per_block
        cache.bytes_NEb[slot // entries, slot % entries] = cache.format.encode(x_TC[stored])

    def store_index_keys(self, cache: IndexCache, x_TC: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_index_keys`."""
        _check_rows("codec.store_index_keys", x_TC, cache.format)
        stored = slot_T >= 0
        slot = slot_T[stored]
        block, offset = slot // cache.entries_per_block, slot % cache.entries_per_block
        sections, parts = _index_sections(cache), cache.format.encode_parts(x_TC[stored])
        sections.data[block, offset] = parts.data
        sections.scales[block, offset] = parts.scales

    def gather_window(self, cache: WindowCache, slot_n: Tensor) -> Tensor:
        """See :meth:`CodecOps.gather_window`."""
        return _gather(slot_n, cache.format, lambda slot: read_window(cache, slot))

    def gather_entries(self, cache: EntryCache, slot_n: Tensor) -> Tensor:
        """See :meth:`CodecOps.gather_entries`."""
        return _gather(slot_n, cache.format, lambda slot: read_entries(cache, slot))

    def gather_index_keys(self, cache: IndexCache, slot_n: Tensor) -> Tensor:
        """See :meth:`CodecOps.gather_index_keys`."""
        return _gather(slot_n, cache.format, lambda slot: read_index_keys(cache, slot))


def _check_rows(op_name: str, x_TC: Tensor, record_format: RecordFormat) -> None:
    require_float(op_name, "x", x_TC)
    if x_TC.dim() != 2:
        refuse(op_name, f"x has shape {tuple(x_TC.shape)}; give [T, {record_format.width}]")
    require_width(op_name, "x", x_TC, record_format.width)


def _gather(slot_n: Tensor, record_format: RecordFormat, read: Callable[[Tensor], Tensor]) -> Tensor:
    # Only slots that exist are read at all: what lies behind a missing one may decode to NaN.
    present = slot_n >= 0
    decoded = read(slot_n[present])
    rows_nC = decoded.new_zeros((slot_n.shape[0], record_format.width))
    rows_nC[present] = decoded
    return rows_nC
