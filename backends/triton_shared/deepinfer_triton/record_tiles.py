"""Tiles of cache records, for kernels that read many at once: bytes first, then their values.

The two steps are apart so that bytes from two memories can be joined before they are decoded. Data lie in groups that
share a scale, so that a scale is read once and spread over its group.

Legend: n records of a tile, G groups, L lanes of a group in memory (bytes of pairs for 4-bit codes), C channels.
"""

from __future__ import annotations

import triton.language as tl

from deepinfer.numerics import RecordFormat
from deepinfer_triton.configuration import power_of_two
from deepinfer_triton.jit import device_function
from deepinfer_triton.number_formats import e2m1_value, e4m3_value, e8m0_value
from deepinfer_triton.record_layout import FLOAT32, LONG_RANGE, WINDOW
from deepinfer_triton.record_writing import FLOAT32_GROUP

_WINDOW = tl.constexpr(WINDOW)
_LONG_RANGE = tl.constexpr(LONG_RANGE)
_FLOAT32 = tl.constexpr(FLOAT32)


def group_of(kind: int, record_format: RecordFormat) -> int:
    """Return how many channels form a group of a tile; float32 records have no scales and may form any."""
    return FLOAT32_GROUP if kind == FLOAT32 else record_format.group


def channel_block(width: int) -> int:
    """Return the channels of a tile that holds whole records: a power of two, at least one group of every format."""
    return max(FLOAT32_GROUP, power_of_two(width))


@device_function
def tile_data(
    memory_ptr: tl.tensor,
    start_n: tl.tensor,
    exists_n: tl.tensor,
    first_group: tl.tensor,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return [n, G, L] as stored: bytes, or float32; zeros where there is no record or no channel."""
    PACKED: tl.constexpr = 1 if KIND == _FLOAT32 or KIND == _WINDOW else 2  # noqa: SIM109  # not in the kernel language
    LANES: tl.constexpr = GROUP // PACKED
    group = first_group + tl.arange(0, GROUPS)
    place = group[:, None] * LANES + tl.arange(0, LANES)[None, :]
    inside = exists_n[:, None, None] & (place < WIDTH // PACKED)[None, :, :]
    data = memory_ptr + start_n[:, None, None] + place[None, :, :]
    if KIND == _FLOAT32:  # noqa: SIM108  # the kernel's dtype decides which constant compiles
        stored = tl.load(data, mask=inside, other=0.0)
    else:
        stored = tl.load(data, mask=inside, other=0)
    return stored


@device_function
def tile_scales(
    memory_ptr: tl.tensor,
    start_n: tl.tensor,
    exists_n: tl.tensor,
    first_group: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return the scale codes [n, G] as stored; 0 where there is no record or no channel."""
    group = first_group + tl.arange(0, GROUPS)
    inside = exists_n[:, None] & (group * GROUP < WIDTH)[None, :]
    return tl.load(memory_ptr + start_n[:, None] + group[None, :], mask=inside, other=0)


@device_function
def tile_values(data_nGL: tl.tensor, scale_nG: tl.tensor, KIND: tl.constexpr, CHANNELS: tl.constexpr) -> tl.tensor:
    """Return float32 [n, C]; missing records and channels are zeros. Scales of float32 records are not looked at."""
    if KIND == _FLOAT32:
        values = tl.reshape(data_nGL, (data_nGL.shape[0], CHANNELS))
    elif KIND == _WINDOW:
        scale = e8m0_value(scale_nG.to(tl.int32))[:, :, None]
        values = tl.reshape(e4m3_value(data_nGL.to(tl.int32)) * scale, (data_nGL.shape[0], CHANNELS))
    else:
        code = scale_nG.to(tl.int32)
        scale = (e4m3_value(code) if KIND == _LONG_RANGE else e8m0_value(code))[:, :, None]
        packed = data_nGL.to(tl.int32)
        both = tl.join(e2m1_value(packed) * scale, e2m1_value(packed >> 4) * scale)
        values = tl.reshape(both, (data_nGL.shape[0], CHANNELS))
    return values
