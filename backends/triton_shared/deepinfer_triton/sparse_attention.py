"""Launches sparse attention: which kernel serves a call, and its arguments.

Legend: T rows, H heads, C head width, b record bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.numerics import LongRangeRecord, WindowRecord
from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, Arithmetic
from deepinfer_triton.attention_exact import exact_configuration
from deepinfer_triton.attention_rows import AttentionRows, EntryRecords, check_call, entry_records
from deepinfer_triton.attention_served import served_configuration
from deepinfer_triton.configuration import Configuration, launch
from deepinfer_triton.record_layout import FLOAT32, LONG_RANGE, WINDOW, RecordPlaces, kind_of, row_places, window_places
from deepinfer_triton.record_tiles import group_of
from deepinfer_triton.record_writing import FLOAT32_GROUP
from deepinfer_triton.rows import ALIGNMENT_BYTES, aligned
from deepinfer_triton.sizes import ModelSizes


def attend(
    op_name: str,
    arithmetic: Arithmetic,
    query_THC: Tensor,
    own_records_Tb: Tensor,
    window: WindowCache,
    long_range: LongRange | None,
    sinks_H: Tensor,
    window_size: int,
    rows: AttentionRows,
) -> Tensor:
    """Return what every row attends to [T, H, C]; see :meth:`deepinfer.accelerator.ops.AttentionOps.sparse`."""
    count = rows.position_T.shape[0]
    check_call(op_name, query_THC, own_records_Tb, window, sinks_H, window_size, count)
    heads, width = query_THC.shape[1:]
    if count == 0 or rows.cached_R.shape[0] == 0:
        return torch.zeros_like(query_THC, memory_format=torch.contiguous_format)
    query_THC = aligned(query_THC)
    out_THC = torch.empty((count, heads, width), dtype=query_THC.dtype, device=query_THC.device)
    own = row_places(op_name, aligned(own_records_Tb), window.format)
    ring = window_places(op_name, window)
    entries = entry_records(op_name, long_range, window, rows)
    window_kind = kind_of(op_name, window.format)
    group = group_of(window_kind, window.format)
    alignment = _alignment(own, ring, entries)
    grid: tuple[int, ...]
    narrow = query_THC.dtype == torch.bfloat16 and FLOAT32 not in (window_kind, entries.kind)
    if not (arithmetic.served and narrow and alignment >= _alignment_of_records(width)):
        chosen = exact_configuration(
            width, query_THC.dtype, window_kind, group, entries.kind, entries.group, rounded=arithmetic.served
        )
        grid = (count, -(-heads // int(chosen.constants["HEADS"])), -(-width // int(chosen.constants["CHUNK"])))
    else:
        alignment = _alignment_of_records(width)
        chosen = served_configuration(width, heads, window_kind, group, entries.kind, entries.group, alignment)
        grid = (count, -(-heads // int(chosen.constants["HEADS"])))
    table, *places = rows.tensors()
    launch(
        chosen,
        grid,
        query_THC,
        own.memory,
        ring.memory,
        entries.places.memory,
        entries.entries_TK,
        sinks_H.to(torch.float32).contiguous(),
        table,
        *places,
        out_THC,
        query_THC.stride(0),
        query_THC.stride(1),
        own.outer_stride,
        ring.inner_count,
        ring.outer_stride,
        ring.data_stride,
        ring.scale_start,
        entries.places.inner_count,
        entries.places.outer_stride,
        entries.places.data_stride,
        entries.places.scale_start,
        0 if rows.table_RB is None else table.stride(0),
        window_size,
        entries.top_k,
        heads,
        math.pow(width, -0.5),
    )
    return out_THC


def _alignment_of_records(width: int) -> int:
    """Return 16 if released records of this width are multiples of 16 bytes long, as those of 512 channels are, or 1.

    The matrix kernel reads records of such a length as words. A pool that lies elsewhere has the kernel of float32
    products: where a pool lies is fixed for the life of an engine, so that this choice is.
    """
    lengths = (WindowRecord(width).nbytes, LongRangeRecord(width).nbytes)
    return ALIGNMENT_BYTES if all(length % ALIGNMENT_BYTES == 0 for length in lengths) else 1


def _alignment(own: RecordPlaces, ring: RecordPlaces, entries: EntryRecords) -> int:
    """Return 16 if every record of the call starts at a multiple of 16 bytes, or 1."""
    numbers = [own.outer_stride, ring.outer_stride, ring.data_stride, ring.memory.storage_offset()]
    if entries.top_k:
        places = entries.places
        numbers += [places.outer_stride, places.data_stride, places.memory.storage_offset()]
    return ALIGNMENT_BYTES if all(number % ALIGNMENT_BYTES == 0 for number in numbers) else 1


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's attention uses: released and float32 records, both numerics."""
    width = sizes.head_width
    window, entry = WindowRecord(width), LongRangeRecord(width)
    released = (WINDOW, window.group, LONG_RANGE, entry.group)
    unquantised = (FLOAT32, FLOAT32_GROUP, FLOAT32, FLOAT32_GROUP)
    yield served_configuration(width, sizes.heads, *released, _alignment_of_records(width))
    for activation in ACTIVATION_DTYPES:
        for rounded in (False, True):
            yield exact_configuration(width, activation, *unquantised, rounded=rounded)
            yield exact_configuration(width, activation, *released, rounded=rounded)
