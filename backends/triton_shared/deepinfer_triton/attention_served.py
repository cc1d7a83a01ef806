"""Sparse attention on matrix units: numerics "served" with bfloat16 activations and the released records.

Decoded records have at most six significant bits, so that bfloat16 holds them exactly; queries are bfloat16 already,
and the contract rounds the weights to bfloat16: all that is rounded here is what the contract rounds. A tile of keys is
decoded once and serves as keys and as values. Heads are the rows of the first product, 64 of them fill the matrix
units of SM90 and SM100; channels are the rows of the second, so that its sums fill all lanes of SM100's tensor memory.
Channels are cut into four parts: one part of a tile at a time is decoded, and one part of the sums is read, scaled and
written back, which is what the registers of a program hold.

Legend: T rows, H heads, C channels, n keys of a tile, K selected entries.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl

from deepinfer_triton.attention_exact import UNALIGNED, attention_signature
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
from deepinfer_triton.configuration import Configuration, power_of_two
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.record_tiles import channel_block

MOST_HEADS = 64
LEAST_HEADS = 16
KEYS = 32
MOST_PARTS = 4
LEAST_PART = 32
"""Channels of a group of window records: a part holds whole groups."""


@device_function
def query_part(
    query_ptr: tl.tensor, real_H: tl.tensor, first: tl.tensor, WIDTH: tl.constexpr, PART: tl.constexpr
) -> tl.tensor:
    """Return some channels of all heads; zeros where there is no head or no channel."""
    channel = first + tl.arange(0, PART)[None, :]
    return tl.load(query_ptr + channel, mask=real_H[:, None] & (channel < WIDTH), other=0.0)


@device_function
def store_part(
    out_ptr: tl.tensor,
    sum_CH: tl.tensor,
    total_H: tl.tensor,
    real_H: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Write some channels of all heads."""
    channel = first + tl.arange(0, PART)[None, :]
    output = quotient(tl.trans(sum_CH), total_H).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + channel, output, mask=real_H[:, None] & (channel < WIDTH))


@kernel(unaligned=UNALIGNED)
def served_attention_kernel(
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
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW_KIND: tl.constexpr,
    WINDOW_GROUP: tl.constexpr,
    ENTRY_KIND: tl.constexpr,
    ENTRY_GROUP: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """One program a row and a block of heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    request = tl.load(request_ptr + row)
    newest = tl.load(position_ptr + row).to(tl.int32)
    cached = tl.load(cached_ptr + request).to(tl.int32)
    own_first = tl.load(start_ptr + request).to(tl.int32) - cached
    ring_slot = ring_ptr + tl.load(slot_ptr + request) * ring_slot_stride
    first = tl.maximum(tl.load(first_ptr + request), 0).to(tl.int32)
    is_valid = tl.load(valid_ptr + row) != 0
    last_window = tl.where(is_valid, window, 0)
    last_entry = tl.where(is_valid, top_k, 0)
    query_row = query_ptr + row * query_row_stride + (head.to(tl.int64) * query_head_stride)[:, None]
    query_0 = query_part(query_row, real, 0, WIDTH, PART)
    query_1, query_2, query_3 = query_0, query_0, query_0
    if PARTS > 1:
        query_1 = query_part(query_row, real, PART, WIDTH, PART)
    if PARTS > 2:
        query_2 = query_part(query_row, real, 2 * PART, WIDTH, PART)
        query_3 = query_part(query_row, real, 3 * PART, WIDTH, PART)
    largest, total = first_state(tl.load(sink_ptr + head, mask=real, other=0.0))
    sum_0 = tl.zeros((PART, HEADS), tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    begin = tl.maximum(first - (newest - window + 1), 0) // KEYS * KEYS
    for start in range(begin, last_window, KEYS):
        position, in_own, in_ring = window_places(start, newest, first, cached, window, KEYS)
        own_start = tl.multiple_of((own_first + position).to(tl.int64) * own_stride, ALIGNMENT)
        ring_start = tl.multiple_of((tl.where(in_ring, position, 0) % ring).to(tl.int64) * ring_stride, ALIGNMENT)
        records = tl.multiple_of(ring_slot, ALIGNMENT)
        keys_0 = window_values(
            own_ptr, records, own_start, ring_start, in_own, in_ring, ring_scale_start, 0,
            WINDOW_KIND, WIDTH, WINDOW_GROUP, PART // WINDOW_GROUP,
        ).to(tl.bfloat16)  # fmt: skip
        score = tl.dot(query_0, tl.trans(keys_0))
        keys_1, keys_2, keys_3 = keys_0, keys_0, keys_0
        if PARTS > 1:
            keys_1 = window_values(
                own_ptr, records, own_start, ring_start, in_own, in_ring, ring_scale_start, PART // WINDOW_GROUP,
                WINDOW_KIND, WIDTH, WINDOW_GROUP, PART // WINDOW_GROUP,
            ).to(tl.bfloat16)  # fmt: skip
            score = tl.dot(query_1, tl.trans(keys_1), score)
        if PARTS > 2:
            keys_2 = window_values(
                own_ptr, records, own_start, ring_start, in_own, in_ring, ring_scale_start, 2 * PART // WINDOW_GROUP,
                WINDOW_KIND, WIDTH, WINDOW_GROUP, PART // WINDOW_GROUP,
            ).to(tl.bfloat16)  # fmt: skip
            score = tl.dot(query_2, tl.trans(keys_2), score)
            keys_3 = window_values(
                own_ptr, records, own_start, ring_start, in_own, in_ring, ring_scale_start, 3 * PART // WINDOW_GROUP,
                WINDOW_KIND, WIDTH, WINDOW_GROUP, PART // WINDOW_GROUP,
            ).to(tl.bfloat16)  # fmt: skip
            score = tl.dot(query_3, tl.trans(keys_3), score)
        weight, decay, largest, total = softmax_step(score * scale, in_own | in_ring, largest, total)
        rounded = tl.trans(weight.to(tl.bfloat16))
        sum_0 = tl.dot(tl.trans(keys_0), rounded, sum_0 * decay[None, :])
        if PARTS > 1:
            sum_1 = tl.dot(tl.trans(keys_1), rounded, sum_1 * decay[None, :])
        if PARTS > 2:
            sum_2 = tl.dot(tl.trans(keys_2), rounded, sum_2 * decay[None, :])
            sum_3 = tl.dot(tl.trans(keys_3), rounded, sum_3 * decay[None, :])
    entries = entries_ptr + row * top_k
    table = table_ptr + request * table_stride
    used = used_entries(entries, last_entry)
    for start in range(used * 0, used, KEYS):
        place, exists = entry_places(entries, table, start, used, per_block, block_stride, entry_stride, KEYS)
        records = tl.multiple_of(memory_ptr + used * 0, ALIGNMENT)
        place = tl.multiple_of(place, ALIGNMENT)
        keys_0 = entry_values(
            records, place, exists, entry_scale_start, 0,
            ENTRY_KIND, WIDTH, ENTRY_GROUP, PART // ENTRY_GROUP,
        ).to(tl.bfloat16)  # fmt: skip
        score = tl.dot(query_0, tl.trans(keys_0))
        keys_1, keys_2, keys_3 = keys_0, keys_0, keys_0
        if PARTS > 1:
            keys_1 = entry_values(
                records, place, exists, entry_scale_start, PART // ENTRY_GROUP,
                ENTRY_KIND, WIDTH, ENTRY_GROUP, PART // ENTRY_GROUP,
            ).to(tl.bfloat16)  # fmt: skip
            score = tl.dot(query_1, tl.trans(keys_1), score)
        if PARTS > 2:
            keys_2 = entry_values(
                records, place, exists, entry_scale_start, 2 * PART // ENTRY_GROUP,
                ENTRY_KIND, WIDTH, ENTRY_GROUP, PART // ENTRY_GROUP,
            ).to(tl.bfloat16)  # fmt: skip
            score = tl.dot(query_2, tl.trans(keys_2), score)
            keys_3 = entry_values(
                records, place, exists, entry_scale_start, 3 * PART // ENTRY_GROUP,
                ENTRY_KIND, WIDTH, ENTRY_GROUP, PART // ENTRY_GROUP,
            ).to(tl.bfloat16)  # fmt: skip
            score = tl.dot(query_3, tl.trans(keys_3), score)
        weight, decay, largest, total = softmax_step(score * scale, exists, largest, total)
        rounded = tl.trans(weight.to(tl.bfloat16))
        sum_0 = tl.dot(tl.trans(keys_0), rounded, sum_0 * decay[None, :])
        if PARTS > 1:
            sum_1 = tl.dot(tl.trans(keys_1), rounded, sum_1 * decay[None, :])
        if PARTS > 2:
            sum_2 = tl.dot(tl.trans(keys_2), rounded, sum_2 * decay[None, :])
            sum_3 = tl.dot(tl.trans(keys_3), rounded, sum_3 * decay[None, :])
    out_row = out_ptr + ((row * heads + head) * WIDTH)[:, None]
    store_part(out_row, sum_0, total, real, 0, WIDTH, PART)
    if PARTS > 1:
        store_part(out_row, sum_1, total, real, PART, WIDTH, PART)
    if PARTS > 2:
        store_part(out_row, sum_2, total, real, 2 * PART, WIDTH, PART)
        store_part(out_row, sum_3, total, real, 3 * PART, WIDTH, PART)


@cache
def served_configuration(
    width: int,
    heads: int,
    window_kind: int,
    window_group: int,
    entry_kind: int,
    entry_group: int,
    alignment: int,
) -> Configuration:
    """Return the configuration for records of these kinds whose places are multiples of ``alignment`` bytes."""
    part = max(LEAST_PART, channel_block(width) // MOST_PARTS)
    constants = {
        "WIDTH": width,
        "PART": part,
        "PARTS": channel_block(width) // part,
        "HEADS": max(LEAST_HEADS, min(MOST_HEADS, power_of_two(heads))),
        "KEYS": KEYS,
        "WINDOW_KIND": window_kind,
        "WINDOW_GROUP": window_group,
        "ENTRY_KIND": entry_kind,
        "ENTRY_GROUP": entry_group,
        "ALIGNMENT": alignment,
    }
    signature = attention_signature(torch.bfloat16, window_kind, entry_kind)
    return Configuration(served_attention_kernel, signature, constants, num_warps=8)
