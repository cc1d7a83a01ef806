"""Gathers cache records by slot and decodes them; copies encoded records to their slots.

Legend: n slots, C record width, G blocks of a record, b record bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.numerics import IndexRecord, LongRangeRecord, RecordFormat, WindowRecord
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two
from deepinfer_triton.jit import kernel
from deepinfer_triton.number_formats import e2m1_value, e4m3_value, e8m0_value
from deepinfer_triton.record_layout import FLOAT32, INDEX, LONG_RANGE, WINDOW, RecordPlaces, kind_of
from deepinfer_triton.record_writing import FLOAT32_GROUP
from deepinfer_triton.rows import consecutive
from deepinfer_triton.sizes import ModelSizes

_WINDOW = tl.constexpr(WINDOW)
_LONG_RANGE = tl.constexpr(LONG_RANGE)
_FLOAT32 = tl.constexpr(FLOAT32)


@kernel(unaligned=("memory_ptr", "slot_ptr"))
def record_reading_kernel(
    memory_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    out_ptr: tl.tensor,
    inner_count: tl.int64,
    outer_stride: tl.int64,
    data_stride: tl.int64,
    scale_start: tl.int64,
    scale_stride: tl.int64,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """One program a slot; slot -1 reads nothing and gives zeros."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    stored = slot >= 0
    known = tl.where(stored, slot, 0)
    outer = known // inner_count
    inner = known - outer * inner_count
    data = memory_ptr + outer * outer_stride + inner * data_stride
    scales = memory_ptr + scale_start + outer * outer_stride + inner * scale_stride
    out_row = out_ptr + row * WIDTH
    group = tl.arange(0, GROUPS)
    real = group * GROUP < WIDTH
    if KIND == _FLOAT32:
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = column < WIDTH
        tl.store(out_row + column, tl.load(data + column, mask=inside & stored, other=0.0), mask=inside)
    else:
        inside = real[:, None]
        scale_code = tl.load(scales + group, mask=real & stored, other=0).to(tl.int32)
        scale = (e4m3_value(scale_code) if KIND == _LONG_RANGE else e8m0_value(scale_code))[:, None]
        if KIND == _WINDOW:
            column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            code = tl.load(data + column, mask=inside & stored, other=0).to(tl.int32)
            tl.store(out_row + column, e4m3_value(code) * scale, mask=inside)
        else:
            pair = tl.arange(0, GROUP // 2)[None, :]
            place = group[:, None] * (GROUP // 2) + pair
            packed = tl.load(data + place, mask=inside & stored, other=0).to(tl.int32)
            tl.store(out_row + 2 * place, e2m1_value(packed) * scale, mask=inside)
            tl.store(out_row + 2 * place + 1, e2m1_value(packed >> 4) * scale, mask=inside)


@cache
def configuration(kind: int, width: int, group: int) -> Configuration:
    """Return the configuration for records of one format."""
    memory = torch.float32 if kind == FLOAT32 else torch.uint8
    signature = pointers(memory_ptr=memory, slot_ptr=torch.int64, out_ptr=torch.float32)
    numbers = ("inner_count", "outer_stride", "data_stride", "scale_start", "scale_stride")
    constants = {"KIND": kind, "WIDTH": width, "GROUP": group, "GROUPS": power_of_two(-(-width // group))}
    return Configuration(record_reading_kernel, signature | dict.fromkeys(numbers, "i64"), constants, num_warps=1)


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's caches use."""
    for kind, record_format in (
        (WINDOW, WindowRecord(sizes.head_width)),
        (LONG_RANGE, LongRangeRecord(sizes.head_width)),
        (INDEX, IndexRecord(sizes.index_width)),
    ):
        yield configuration(kind, record_format.width, record_format.group)
    for width in (sizes.head_width, sizes.index_width):
        yield configuration(FLOAT32, width, FLOAT32_GROUP)


def read_records(op_name: str, record_format: RecordFormat, places: RecordPlaces, slot_n: Tensor) -> Tensor:
    """Return decoded float32 [n, C]; slot -1 gives a row of zeros."""
    kind = kind_of(op_name, record_format)
    group = FLOAT32_GROUP if kind == FLOAT32 else record_format.group
    out_nC = torch.empty((slot_n.shape[0], record_format.width), dtype=torch.float32, device=slot_n.device)
    launch(
        configuration(kind, record_format.width, group),
        (slot_n.shape[0],),
        places.memory,
        consecutive(slot_n),
        out_nC,
        *places.numbers,
    )
    return out_nC
