"""Index scores of the entries that rows may see, as integers that are ordered as the scores are.

Keys are decoded once for several rows of a request, entries are the rows of the product and heads its columns, so that
a thread holds all heads of an entry and adds them in ascending order. Values of released records have two significant
bits, and so have rounded queries: bfloat16 holds them exactly, and every product is exact in float32.

Where only candidate blocks compete, the competitors of a row are those blocks' entries, one behind the other: as many
for every row, however long its context is. They ascend because blocks do.

Legend: T rows, J index heads, I index width, G groups, N competitors of a tile, B candidate blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl

from deepinfer.numerics import IndexRecord
from deepinfer_triton.configuration import Configuration, pointers, power_of_two
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.number_formats import (
    INFINITY_BITS,
    MAGNITUDE_BITS,
    NAN_BITS,
    bits_of,
    e2m1_codes,
    e2m1_value,
    e8m0_value,
    float_of,
    inverse_power,
    largest_magnitude,
    mxfp4_scales,
    order_keys,
)
from deepinfer_triton.record_layout import FLOAT32, INDEX
from deepinfer_triton.record_tiles import channel_block, tile_data, tile_scales, tile_values
from deepinfer_triton.rows import ALIGNMENT_BYTES

EXCLUDED = tl.constexpr(-(2**31))
"""Order key of what does not compete; :func:`order_keys` never gives it."""

TILE = 128
FLOAT_TILE = 32
TILES_PER_PROGRAM = 8
ROWS_PER_PROGRAM = 8
ROUNDED_BLOCKS = 64
_FLOAT32 = tl.constexpr(FLOAT32)
UNALIGNED = ("memory_ptr", "table_ptr", "candidates_ptr", "position_ptr", "request_ptr", "valid_ptr", "start_ptr")


@kernel()
def rounded_query_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, blocks: tl.int64, GROUP: tl.constexpr, BLOCKS: tl.constexpr
) -> None:
    """One program so many blocks of channels that share a scale: what index records would hold of them."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (block < blocks)[:, None]
    place = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    largest = largest_magnitude(x)
    power = mxfp4_scales(largest)
    code = e2m1_codes(x, float_of(bits_of(x) & MAGNITUDE_BITS) * inverse_power(power)[:, None])
    value = e2m1_value(code) * e8m0_value(power)[:, None]
    value = tl.where((largest < INFINITY_BITS)[:, None], value, float_of(tl.zeros_like(code) + NAN_BITS))
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=inside)


@device_function
def seen_entries(position_ptr: tl.tensor, valid_ptr: tl.tensor, row: tl.tensor, ratio: tl.tensor) -> tl.tensor:
    """Return how many entries a row sees."""
    position = tl.load(position_ptr + row).to(tl.int32)
    return tl.where(tl.load(valid_ptr + row) != 0, (position + 1) // ratio, 0)


@device_function
def add_heads(total_N: tl.tensor, terms_NJ: tl.tensor, HEADS: tl.constexpr) -> tl.tensor:
    """Return ``((total + first head) + second head) + ...``: halves of the heads are split off until one is left."""
    if HEADS == 1:
        total = total_N + tl.reshape(terms_NJ, (terms_NJ.shape[0],))
    else:
        halves = tl.permute(tl.reshape(terms_NJ, (terms_NJ.shape[0], 2, HEADS // 2)), (0, 2, 1))
        lower, upper = tl.split(halves)
        total = add_heads(total_N, lower, HEADS // 2)
        total = add_heads(total, upper, HEADS // 2)
    return total


@device_function
def tile_scores(keys_NI: tl.tensor, query_JI: tl.tensor, weight_J: tl.tensor, real_J: tl.tensor) -> tl.tensor:
    """Return the scores [N] of a tile of keys for one row."""
    if keys_NI.dtype == tl.bfloat16:
        dots = tl.dot(keys_NI, tl.trans(query_JI))
    else:
        dots = tl.dot(keys_NI, tl.trans(query_JI), input_precision="ieee")
    # Not a maximum instruction: those may return the other operand for NaN.
    rectified = tl.where(dots <= 0.0, 0.0, dots)
    terms = tl.where(real_J[None, :], weight_J[None, :] * rectified, 0.0)
    return add_heads(tl.zeros((keys_NI.shape[0],), tl.float32), terms, query_JI.shape[0])


@kernel(unaligned=UNALIGNED)
def index_scores_kernel(
    query_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    memory_ptr: tl.tensor,
    table_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    position_ptr: tl.tensor,
    request_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    start_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    per_block: tl.int32,
    block_stride: tl.int64,
    data_stride: tl.int64,
    scale_start: tl.int64,
    scale_stride: tl.int64,
    table_stride: tl.int64,
    ratio: tl.int32,
    first_row: tl.int64,
    last_row: tl.int64,
    row_blocks: tl.int64,
    competitors: tl.int32,
    candidate_size: tl.int32,
    heads: tl.int32,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    RESTRICTED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """One program a piece of the competitors, of one row if only candidates compete, or of rows of one request."""
    CHANNELS: tl.constexpr = GROUPS * GROUP
    number = tl.program_id(0).to(tl.int64)
    if RESTRICTED:
        first = first_row + number
        last = first + 1
        request = tl.load(request_ptr + first)
    else:
        request = number // row_blocks
        begin = tl.load(start_ptr + request) + (number - request * row_blocks) * ROWS
        first = tl.maximum(begin, first_row)
        last = tl.minimum(tl.minimum(begin + ROWS, tl.load(start_ptr + request + 1)), last_row)
    visible = (first * 0).to(tl.int32)
    for row in range(first, last):
        visible = tl.maximum(visible, seen_entries(position_ptr, valid_ptr, row, ratio))
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, CHANNELS)
    real = head < heads
    inside = real[:, None] & (channel < WIDTH)[None, :]
    begin = tl.program_id(1) * (TILES * TILE)
    limit = competitors if RESTRICTED else visible
    for start in range(begin, tl.minimum(limit, begin + TILES * TILE), TILE):
        place = start + tl.arange(0, TILE)
        if RESTRICTED:
            listed = place < competitors
            column = place // candidate_size
            block = tl.load(
                candidates_ptr + first * (competitors // candidate_size) + column, mask=listed, other=-1
            ).to(tl.int32)
            entry = block * candidate_size + (place - column * candidate_size)
            exists = (block >= 0) & (entry < visible)
        else:
            entry = place
            exists = entry < visible
        known = tl.where(exists, entry, 0)
        outer = known // per_block
        inner = (known - outer * per_block).to(tl.int64)
        table = tl.load(table_ptr + request * table_stride + outer, mask=exists, other=0) * block_stride
        records = tl.multiple_of(memory_ptr + request * 0, ALIGNMENT)
        record = tl.multiple_of(table + inner * data_stride, ALIGNMENT)
        data = tile_data(records, record, exists, 0, KIND, WIDTH, GROUP, GROUPS)
        if KIND == _FLOAT32:
            keys = tile_values(data, data, KIND, CHANNELS)
        else:
            scale_places = table + scale_start + inner * scale_stride
            scales = tile_scales(memory_ptr, scale_places, exists, 0, WIDTH, GROUP, GROUPS)
            keys = tile_values(data, scales, KIND, CHANNELS).to(tl.bfloat16)
        for row in range(first, last):
            seen = seen_entries(position_ptr, valid_ptr, row, ratio)
            weight = tl.load(weight_ptr + row * heads + head, mask=real, other=0.0).to(tl.float32)
            query_row = query_ptr + row * heads * WIDTH + (head * WIDTH)[:, None]
            query = tl.load(query_row + channel[None, :], mask=inside, other=0.0).to(keys.dtype)
            key = order_keys(tile_scores(keys, query, weight, real))
            competes = exists & (entry < seen)
            key = tl.where(competes, key, EXCLUDED)
            tl.store(keys_ptr + (row - first_row) * competitors + place, key, mask=place < competitors)


@cache
def rounding_configuration(group: int, dtype: torch.dtype) -> Configuration:
    """Return the configuration that rounds queries of one dtype."""
    signature = pointers(x_ptr=dtype, out_ptr=torch.bfloat16)
    return Configuration(
        rounded_query_kernel, {**signature, "blocks": "i64"}, {"GROUP": group, "BLOCKS": ROUNDED_BLOCKS}
    )


@cache
def scores_configuration(
    width: int,
    heads: int,
    kind: int,
    query: torch.dtype,
    weight: torch.dtype,
    alignment: int,
    *,
    restricted: bool,
) -> Configuration:
    """Return the configuration that scores keys of one kind; ``query`` is the dtype of rounded queries."""
    group = IndexRecord.group
    integers = torch.int64
    signature = pointers(
        query_ptr=query,
        weight_ptr=weight,
        memory_ptr=torch.float32 if kind == FLOAT32 else torch.uint8,
        table_ptr=integers,
        candidates_ptr=integers,
        position_ptr=integers,
        request_ptr=integers,
        valid_ptr=torch.uint8,
        start_ptr=integers,
        keys_ptr=torch.int32,
    )
    numbers = ("per_block", "block_stride", "data_stride", "scale_start", "scale_stride", "table_stride", "ratio",
               "first_row", "last_row", "row_blocks", "competitors", "candidate_size", "heads")  # fmt: skip
    tile = FLOAT_TILE if kind == FLOAT32 else TILE
    constants = {
        "WIDTH": width,
        "GROUP": group,
        "GROUPS": channel_block(width) // group,
        "HEADS": max(16, power_of_two(heads)),
        "KIND": kind,
        "TILE": tile,
        "TILES": TILE * TILES_PER_PROGRAM // tile,
        "ROWS": ROWS_PER_PROGRAM,
        "RESTRICTED": restricted,
        "ALIGNMENT": alignment,
    }
    small = ("per_block", "ratio", "competitors", "candidate_size", "heads")
    types = {name: "i32" if name in small else "i64" for name in numbers}
    return Configuration(index_scores_kernel, signature | types, constants)


def scores_configurations(width: int, heads: int, activations: tuple[torch.dtype, ...]) -> Iterator[Configuration]:
    """Yield what a model's indexers use."""
    data_bytes = IndexRecord(width).data_bytes
    for activation in activations:
        yield rounding_configuration(IndexRecord.group, activation)
        for restricted in (False, True):
            for alignment in (ALIGNMENT_BYTES, 1) if data_bytes % ALIGNMENT_BYTES == 0 else (1,):
                yield scores_configuration(
                    width, heads, INDEX, torch.bfloat16, activation, alignment, restricted=restricted
                )
            yield scores_configuration(width, heads, FLOAT32, activation, activation, 1, restricted=restricted)
