"""Where the bytes of cache records lie, and which kernel constants say how they are read.

Every cache is addressed alike: a flat slot is ``outer * inner_count + inner``; data and scale bytes of a record start
at ``outer * outer_stride + inner * data_stride`` and ``scale_start + outer * outer_stride + inner * scale_stride``.
Slots and strides are 64 bits wide: pools pass 2^31 bytes.

Legend: Z state slots, R ring positions, N blocks, E entries of a block, b bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.caches import EntryCache, IndexCache, WindowCache
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, RecordFormat, WindowRecord
from deepinfer_triton.arithmetic import refuse

WINDOW, LONG_RANGE, INDEX, FLOAT32 = range(4)
_KINDS: tuple[tuple[type[RecordFormat], int], ...] = (
    (WindowRecord, WINDOW),
    (LongRangeRecord, LONG_RANGE),
    (IndexRecord, INDEX),
    (Float32Record, FLOAT32),
)
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class RecordPlaces:
    """Records in memory; all numbers in elements of ``memory``: bytes, or float32 for unquantised records.

    Attributes:
        memory: the pool's bytes, or its values.
        inner_count: records that share one ``outer``.
        outer_stride: from one outer to the next.
        data_stride: from the data of one record to the next.
        scale_start: first scale of outer 0.
        scale_stride: from the scales of one record to the next.
    """

    memory: Tensor
    inner_count: int
    outer_stride: int
    data_stride: int
    scale_start: int
    scale_stride: int

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """The addressing numbers, in the order in which kernels take them."""
        return self.inner_count, self.outer_stride, self.data_stride, self.scale_start, self.scale_stride


def kind_of(op_name: str, record_format: RecordFormat) -> int:
    """Return the kernel constant of a format, or refuse a format that has no kernel."""
    kinds = [kind for cls, kind in _KINDS if isinstance(record_format, cls)]
    if not kinds:
        refuse(op_name, f"there is no kernel for {record_format.name!r} records of {type(record_format).__qualname__}")
    return kinds[0]


def row_places(op_name: str, bytes_nb: Tensor, record_format: RecordFormat) -> RecordPlaces:
    """Return the places of records that lie one a row in [n, b]."""
    return _joined(op_name, bytes_nb.unsqueeze(1), record_format)


def window_places(op_name: str, cache: WindowCache) -> RecordPlaces:
    """Return the places of window records: slot ``z * R + p % R``."""
    return _joined(op_name, cache.bytes_ZRb, cache.format)


def entry_places(op_name: str, cache: EntryCache) -> RecordPlaces:
    """Return the places of long-range records: slot ``block * E + offset``."""
    return _joined(op_name, cache.bytes_NEb, cache.format)


def index_places(op_name: str, cache: IndexCache) -> RecordPlaces:
    """Return the places of index keys: within a block first all data, then all scales."""
    record_format, count = cache.format, cache.entries_per_block
    memory = _memory(op_name, cache.bytes_Nb, record_format)
    if isinstance(record_format, Float32Record):
        width = record_format.width
        return RecordPlaces(memory, count, memory.stride(0), width, 0, 0)
    data, scales = record_format.data_bytes, record_format.scale_bytes
    return RecordPlaces(memory, count, memory.stride(0), data, count * data, scales)


def _joined(op_name: str, bytes_NEb: Tensor, record_format: RecordFormat) -> RecordPlaces:
    memory = _memory(op_name, bytes_NEb, record_format)
    outer, inner = memory.stride(0), memory.stride(1)
    scale_start = 0 if isinstance(record_format, Float32Record) else record_format.data_bytes
    return RecordPlaces(memory, memory.shape[1], outer, inner, scale_start, inner)


def _memory(op_name: str, pool: Tensor, record_format: RecordFormat) -> Tensor:
    if pool.dtype != torch.uint8 or (pool.shape[-1] > 1 and pool.stride(-1) != 1):
        refuse(op_name, f"the pool is {pool.dtype} with strides {pool.stride()}; its bytes must be consecutive uint8")
    if not isinstance(record_format, Float32Record):
        return pool
    places = (pool.storage_offset(), *pool.stride()[:-1])
    if any(place % FLOAT32_BYTES for place in places):
        refuse(
            op_name, f"float32 records at offset {places[0]} with strides {places[1:]}; give multiples of four bytes"
        )
    return pool[..., : pool.shape[-1] // FLOAT32_BYTES * FLOAT32_BYTES].view(torch.float32)
