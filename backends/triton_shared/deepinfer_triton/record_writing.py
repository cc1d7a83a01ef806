"""Encodes rows into cache records, in place at their slots or one behind the other.

Legend: T rows, C record width, G blocks of a row, L elements of a block, b record bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.numerics import IndexRecord, LongRangeRecord, RecordFormat, WindowRecord
from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, refuse, require_width
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two
from deepinfer_triton.jit import kernel
from deepinfer_triton.number_formats import (
    INFINITY_BITS,
    bits_of,
    e2m1_codes,
    e4m3_value,
    float_of,
    fp8_codes,
    fp8_scales,
    inverse_power,
    largest_magnitude,
    long_range_scales,
    mxfp4_scales,
    rounded_reciprocal,
)
from deepinfer_triton.record_layout import FLOAT32, INDEX, LONG_RANGE, WINDOW, RecordPlaces, kind_of
from deepinfer_triton.rows import alignment_of, consecutive, flat_rows
from deepinfer_triton.sizes import ModelSizes

_WINDOW = tl.constexpr(WINDOW)
_LONG_RANGE = tl.constexpr(LONG_RANGE)
_FLOAT32 = tl.constexpr(FLOAT32)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@kernel(unaligned=("memory_ptr", "slot_ptr"))
def record_writing_kernel(
    x_ptr: tl.tensor,
    memory_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    x_stride: tl.int64,
    inner_count: tl.int64,
    outer_stride: tl.int64,
    data_stride: tl.int64,
    scale_start: tl.int64,
    scale_stride: tl.int64,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BY_SLOT: tl.constexpr,
) -> None:
    """One program a row; slot -1 stores nothing."""
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if BY_SLOT:
        slot = tl.load(slot_ptr + row)
    stored = slot >= 0
    known = tl.where(stored, slot, 0)
    outer = known // inner_count
    inner = known - outer * inner_count
    data = memory_ptr + outer * outer_stride + inner * data_stride
    scales = memory_ptr + scale_start + outer * outer_stride + inner * scale_stride
    x_row = x_ptr + tl.multiple_of(row * x_stride, ALIGNMENT)
    group = tl.arange(0, GROUPS)
    real = group * GROUP < WIDTH
    if KIND == _FLOAT32:
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = column < WIDTH
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(data + column, x, mask=inside & stored)
    elif KIND == _WINDOW:
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = real[:, None]
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        largest = largest_magnitude(x)
        finite = largest < INFINITY_BITS
        scale = fp8_scales(largest)
        tl.store(data + column, fp8_codes(x, scale, finite).to(tl.uint8), mask=inside & stored)
        tl.store(scales + group, tl.where(finite, scale, 255).to(tl.uint8), mask=real & stored)
    else:
        # Two codes a byte: even and odd channels are read apart, so that no lane has to know its neighbour.
        pair = tl.arange(0, GROUP // 2)[None, :]
        channel = group[:, None] * GROUP + 2 * pair
        inside = real[:, None]
        even = tl.load(x_row + channel, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(x_row + channel + 1, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest_magnitude(even), largest_magnitude(odd))
        if KIND == _LONG_RANGE:
            has_value = largest <= INFINITY_BITS
            scale = long_range_scales(largest)
            factor = rounded_reciprocal(e4m3_value(scale))[:, None]
        else:
            has_value = largest < INFINITY_BITS
            power = mxfp4_scales(largest)
            scale = tl.where(has_value, power, 255)
            factor = inverse_power(power)[:, None]
        low = e2m1_codes(even, float_of(bits_of(even) & _MAGNITUDE) * factor)
        high = e2m1_codes(odd, float_of(bits_of(odd) & _MAGNITUDE) * factor)
        packed = tl.where(has_value[:, None], low | (high << 4), 0)
        tl.store(data + group[:, None] * (GROUP // 2) + pair, packed.to(tl.uint8), mask=inside & stored)
        tl.store(scales + group, scale.to(tl.uint8), mask=real & stored)


FLOAT32_GROUP = 32
"""Float32 records have no blocks; they are written in tiles of this width."""


@cache
def configuration(kind: int, width: int, group: int, dtype: torch.dtype, *, by_slot: bool) -> Configuration:
    """Return the configuration for records of one format from rows of one dtype."""
    memory = torch.float32 if kind == FLOAT32 else torch.uint8
    signature = pointers(x_ptr=dtype, memory_ptr=memory, slot_ptr=torch.int64)
    numbers = ("x_stride", "inner_count", "outer_stride", "data_stride", "scale_start", "scale_stride")
    constants = {
        "KIND": kind,
        "WIDTH": width,
        "GROUP": group,
        "GROUPS": power_of_two(-(-width // group)),
        "ALIGNMENT": alignment_of(width, dtype),
        "BY_SLOT": by_slot,
    }
    return Configuration(record_writing_kernel, signature | dict.fromkeys(numbers, "i64"), constants, num_warps=1)


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's caches use."""
    for dtype in ACTIVATION_DTYPES:
        for by_slot in (False, True):
            for kind, record_format in (
                (WINDOW, WindowRecord(sizes.head_width)),
                (LONG_RANGE, LongRangeRecord(sizes.head_width)),
                (INDEX, IndexRecord(sizes.index_width)),
            ):
                yield configuration(kind, record_format.width, record_format.group, dtype, by_slot=by_slot)
            for width in (sizes.head_width, sizes.index_width):
                yield configuration(FLOAT32, width, FLOAT32_GROUP, dtype, by_slot=by_slot)


def write_records(
    op_name: str, x_TC: Tensor, record_format: RecordFormat, places: RecordPlaces, slot_T: Tensor | None
) -> None:
    """Encode rows into their slots; None: row t goes to slot t. float64 rows are first rounded to float32."""
    if x_TC.dtype not in (*ACTIVATION_DTYPES, torch.float64):
        known = ", ".join(str(dtype) for dtype in (*ACTIVATION_DTYPES, torch.float64))
        refuse(op_name, f"x has dtype {x_TC.dtype}; give one of {known}")
    if x_TC.dim() != 2:
        refuse(op_name, f"x has shape {tuple(x_TC.shape)}; give [T, {record_format.width}]")
    require_width(op_name, "x", x_TC, record_format.width)
    kind = kind_of(op_name, record_format)
    x_TC = flat_rows(x_TC.to(torch.float32) if x_TC.dtype == torch.float64 else x_TC)
    group = FLOAT32_GROUP if kind == FLOAT32 else record_format.group
    slot = torch.empty(0, dtype=torch.int64, device=x_TC.device) if slot_T is None else consecutive(slot_T)
    launch(
        configuration(kind, record_format.width, group, x_TC.dtype, by_slot=slot_T is not None),
        (x_TC.shape[0],),
        x_TC,
        places.memory,
        slot,
        x_TC.stride(0),
        *places.numbers,
    )
