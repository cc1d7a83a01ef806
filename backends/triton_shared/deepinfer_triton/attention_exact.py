"""Sparse attention with float32 products: numerics "portable", and everything that bfloat16 would not hold.

A program computes the scores of a few heads over all channels, chunk by chunk, and the output of one chunk of channels:
float32 products have no matrix unit of their own everywhere, and their operands must fit in registers. Programs of
other chunks compute the same scores again, with the same bits.

Legend: T rows, H heads, C channels, n keys of a tile, K selected entries.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl

from deepinfer_triton.attention_keys import (
    entry_places,
    entry_values,
    first_state,
    quotient,
    softmax_step,
    used_entries,
    window_places,
    window_values,
)
from deepinfer_triton.configuration import Configuration, pointers
from deepinfer_triton.jit import kernel
from deepinfer_triton.record_layout import FLOAT32
from deepinfer_triton.record_tiles import channel_block

HEADS = 16
KEYS = 16
SCORE_CHUNK = 32
LARGEST_CHUNK = 256
NARROW = 64
UNALIGNED = (
    "ring_ptr",
    "memory_ptr",
    "entries_ptr",
    "table_ptr",
    "position_ptr",
    "request_ptr",
    "valid_ptr",
    "start_ptr",
    "cached_ptr",
    "slot_ptr",
    "first_ptr",
    "sink_ptr",
)


@kernel(unaligned=UNALIGNED)
def exact_attention_kernel(
    query_ptr: tl.tensor,
    own_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    memory_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position_ptr: tl.tensor,
    request_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    start_ptr: tl.tensor,
    cached_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    first_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_row_stride: tl.int64,
    query_head_stride: tl.int64,
    own_stride: tl.int64,
    ring: tl.int32,
    ring_slot_stride: tl.int64,
    ring_stride: tl.int64,
    ring_scale_start: tl.int64,
    per_block: tl.int32,
    block_stride: tl.int64,
    entry_stride: tl.int64,
    entry_scale_start: tl.int64,
    table_stride: tl.int64,
    window: tl.int32,
    top_k: tl.int32,
    heads: tl.int32,
    scale: tl.float32,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORE_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW_KIND: tl.constexpr,
    WINDOW_GROUP: tl.constexpr,
    ENTRY_KIND: tl.constexpr,
    ENTRY_GROUP: tl.constexpr,
    ROUND: tl.constexpr,
) -> None:
    """One program a row, a block of heads, and a chunk of the output's channels."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    own_chunk = tl.program_id(2) * CHUNK
    request = tl.load(request_ptr + row)
    newest = tl.load(position_ptr + row).to(tl.int32)
    cached = tl.load(cached_ptr + request).to(tl.int32)
    own_first = tl.load(start_ptr + request).to(tl.int32) - cached
    ring_start = tl.load(slot_ptr + request) * ring_slot_stride
    first = tl.maximum(tl.load(first_ptr + request), 0).to(tl.int32)
    is_valid = tl.load(valid_ptr + row) != 0
    last_window = tl.where(is_valid, window, 0)
    last_entry = tl.where(is_valid, top_k, 0)
    lane = tl.arange(0, SCORE_CHUNK)[None, :]
    query = query_ptr + row * query_row_stride + (head.to(tl.int64) * query_head_stride)[:, None]
    largest, total = first_state(tl.load(sink_ptr + head, mask=real, other=0.0))
    weighted = tl.zeros((HEADS, CHUNK), tl.float32)
    begin = tl.maximum(first - (newest - window + 1), 0) // KEYS * KEYS
    for start in range(begin, last_window, KEYS):
        position, in_own, in_ring = window_places(start, newest, first, cached, window, KEYS)
        own_start = (own_first + position).to(tl.int64) * own_stride
        ring_place = ring_start + (tl.where(in_ring, position, 0) % ring).to(tl.int64) * ring_stride
        score = tl.zeros((HEADS, KEYS), tl.float32)
        for chunk in range(0, BLOCK, SCORE_CHUNK):
            inside = real[:, None] & (chunk + lane < WIDTH)
            part = tl.load(query + chunk + lane, mask=inside, other=0.0).to(tl.float32)
            keys = window_values(
                own_ptr, ring_ptr, own_start, ring_place, in_own, in_ring, ring_scale_start, chunk // WINDOW_GROUP,
                WINDOW_KIND, WIDTH, WINDOW_GROUP, SCORE_CHUNK // WINDOW_GROUP,
            )  # fmt: skip
            score = tl.dot(part, tl.trans(keys), score, input_precision="ieee")
        weight, decay, largest, total = softmax_step(score * scale, in_own | in_ring, largest, total)
        if ROUND:
            weight = weight.to(tl.bfloat16).to(tl.float32)
        values = window_values(
            own_ptr, ring_ptr, own_start, ring_place, in_own, in_ring, ring_scale_start, own_chunk // WINDOW_GROUP,
            WINDOW_KIND, WIDTH, WINDOW_GROUP, CHUNK // WINDOW_GROUP,
        )  # fmt: skip
        weighted = tl.dot(weight, values, weighted * decay[:, None], input_precision="ieee")
    entries = entries_ptr + row * top_k
    table = table_ptr + request * table_stride
    used = used_entries(entries, last_entry)
    for start in range(used * 0, used, KEYS):
        place, exists = entry_places(entries, table, start, used, per_block, block_stride, entry_stride, KEYS)
        score = tl.zeros((HEADS, KEYS), tl.float32)
        for chunk in range(0, BLOCK, SCORE_CHUNK):
            inside = real[:, None] & (chunk + lane < WIDTH)
            part = tl.load(query + chunk + lane, mask=inside, other=0.0).to(tl.float32)
            keys = entry_values(
                memory_ptr, place, exists, entry_scale_start, chunk // ENTRY_GROUP,
                ENTRY_KIND, WIDTH, ENTRY_GROUP, SCORE_CHUNK // ENTRY_GROUP,
            )  # fmt: skip
            score = tl.dot(part, tl.trans(keys), score, input_precision="ieee")
        weight, decay, largest, total = softmax_step(score * scale, exists, largest, total)
        if ROUND:
            weight = weight.to(tl.bfloat16).to(tl.float32)
        values = entry_values(
            memory_ptr, place, exists, entry_scale_start, own_chunk // ENTRY_GROUP,
            ENTRY_KIND, WIDTH, ENTRY_GROUP, CHUNK // ENTRY_GROUP,
        )  # fmt: skip
        weighted = tl.dot(weight, values, weighted * decay[:, None], input_precision="ieee")
    output = quotient(weighted, total).to(out_ptr.dtype.element_ty)
    column = own_chunk + tl.arange(0, CHUNK)[None, :]
    out = out_ptr + ((row * heads + head) * WIDTH)[:, None] + column
    tl.store(out, output, mask=real[:, None] & (column < WIDTH))


def attention_signature(activation: torch.dtype, window_kind: int, entry_kind: int) -> dict[str, str]:
    """Return the signature that the attention kernels share."""
    integers = torch.int64
    records = {kind: torch.float32 if kind == FLOAT32 else torch.uint8 for kind in (window_kind, entry_kind)}
    signature = pointers(
        query_ptr=activation,
        own_ptr=records[window_kind],
        ring_ptr=records[window_kind],
        memory_ptr=records[entry_kind],
        entries_ptr=integers,
        sink_ptr=torch.float32,
        table_ptr=integers,
        position_ptr=integers,
        request_ptr=integers,
        valid_ptr=torch.uint8,
        start_ptr=integers,
        cached_ptr=integers,
        slot_ptr=integers,
        first_ptr=integers,
        out_ptr=activation,
    )
    numbers = ("query_row_stride", "query_head_stride", "own_stride", "ring", "ring_slot_stride", "ring_stride",
               "ring_scale_start", "per_block", "block_stride", "entry_stride", "entry_scale_start", "table_stride",
               "window", "top_k", "heads")  # fmt: skip
    small = ("ring", "per_block", "window", "top_k", "heads")
    return signature | {name: "i32" if name in small else "i64" for name in numbers} | {"scale": "fp32"}


@cache
def exact_configuration(
    width: int,
    activation: torch.dtype,
    window_kind: int,
    window_group: int,
    entry_kind: int,
    entry_group: int,
    *,
    rounded: bool,
) -> Configuration:
    """Return the configuration for records of these kinds; ``rounded`` weights are those of served numerics."""
    block = channel_block(width)
    constants = {
        "WIDTH": width,
        "BLOCK": block,
        "SCORE_CHUNK": min(block, SCORE_CHUNK),
        "CHUNK": min(block, LARGEST_CHUNK),
        "HEADS": HEADS,
        "KEYS": KEYS,
        "WINDOW_KIND": window_kind,
        "WINDOW_GROUP": window_group,
        "ENTRY_KIND": entry_kind,
        "ENTRY_GROUP": entry_group,
        "ROUND": rounded,
    }
    # Narrow heads with records that need no decoding: eight warps get so few registers each that a form spills.
    num_warps = 4 if block <= NARROW and window_kind == FLOAT32 else 8
    return Configuration(
        exact_attention_kernel, attention_signature(activation, window_kind, entry_kind), constants, num_warps
    )
