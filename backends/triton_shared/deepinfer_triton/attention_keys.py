"""The keys of a row, tile by tile, and the step of a softmax over them: what all attention kernels share.

A row at position p sees the window of ``window`` positions that ends at p, oldest first, then its selected entries in
the order in which they are given. Positions from ``cached`` on are rows of the step itself, earlier ones lie in the
ring. Keys have their place in a tile by their distance from p, or by their place among the entries: what else is in
the step, and how it was cut, changes nothing. A tile without a key of the row is passed over.

Positions, entries and rows are numbers of 32 bits here, which divide fast; addresses have 64.

Legend: n keys of a tile, G groups, C channels, H heads, K selected entries.
"""

from __future__ import annotations

import triton.language as tl

from deepinfer_triton.jit import device_function
from deepinfer_triton.record_layout import FLOAT32
from deepinfer_triton.record_tiles import tile_data, tile_scales, tile_values

_FLOAT32 = tl.constexpr(FLOAT32)
_LANES = tl.constexpr(128)


@device_function
def window_places(
    start: tl.tensor,
    newest: tl.tensor,
    first: tl.tensor,
    cached: tl.tensor,
    window: tl.tensor,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the positions of a tile of the window, which of them are rows of the step, and which lie in the ring."""
    place = start + tl.arange(0, KEYS)
    position = newest - window + 1 + place
    exists = (place < window) & (position >= first)
    return position, exists & (position >= cached), exists & (position < cached)


@device_function
def window_values(
    own_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    own_start_n: tl.tensor,
    ring_start_n: tl.tensor,
    in_own_n: tl.tensor,
    in_ring_n: tl.tensor,
    scale_start: tl.tensor,
    first_group: tl.tensor,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return float32 [n, C] of records that start at these places of the step's own records, or of the ring."""
    own = tile_data(own_ptr, own_start_n, in_own_n, first_group, KIND, WIDTH, GROUP, GROUPS)
    ring = tile_data(ring_ptr, ring_start_n, in_ring_n, first_group, KIND, WIDTH, GROUP, GROUPS)
    data = tl.where(in_own_n[:, None, None], own, ring)
    if KIND == _FLOAT32:
        scales = data
    else:
        own_scales = tile_scales(own_ptr, own_start_n + scale_start, in_own_n, first_group, WIDTH, GROUP, GROUPS)
        ring_scales = tile_scales(ring_ptr, ring_start_n + scale_start, in_ring_n, first_group, WIDTH, GROUP, GROUPS)
        scales = tl.where(in_own_n[:, None], own_scales, ring_scales)
    return tile_values(data, scales, KIND, GROUPS * GROUP)


@device_function
def entry_values(
    memory_ptr: tl.tensor,
    start_n: tl.tensor,
    exists_n: tl.tensor,
    scale_start: tl.tensor,
    first_group: tl.tensor,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return float32 [n, C] of records that start at these places."""
    data = tile_data(memory_ptr, start_n, exists_n, first_group, KIND, WIDTH, GROUP, GROUPS)
    if KIND == _FLOAT32:
        scales = data
    else:
        scales = tile_scales(memory_ptr, start_n + scale_start, exists_n, first_group, WIDTH, GROUP, GROUPS)
    return tile_values(data, scales, KIND, GROUPS * GROUP)


@device_function
def used_entries(entries_ptr: tl.tensor, top_k: tl.tensor) -> tl.tensor:
    """Return one more than the last place that holds an entry."""
    used = top_k * 0
    for start in range(0, top_k, _LANES):
        place = start + tl.arange(0, _LANES)
        entry = tl.load(entries_ptr + place, mask=place < top_k, other=-1)
        used = tl.maximum(used, tl.max(tl.where(entry >= 0, place + 1, 0), 0))
    return used


@device_function
def entry_places(
    entries_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start: tl.tensor,
    used: tl.tensor,
    per_block: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return where the records of a tile of entries start, through the request's block table, and which exist."""
    place = start + tl.arange(0, KEYS)
    entry = tl.load(entries_ptr + place, mask=place < used, other=-1).to(tl.int32)
    exists = entry >= 0
    known = tl.where(exists, entry, 0)
    column = known // per_block
    block = tl.load(table_ptr + column, mask=exists, other=0)
    return block * outer_stride + (known - column * per_block).to(tl.int64) * inner_stride, exists


@device_function
def first_state(sink_H: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the largest score and the total of weights before any key: those of the sink, a key without a value."""
    return sink_H, tl.where(sink_H == float("-inf"), 0.0, 1.0)


@device_function
def softmax_step(
    score_Hn: tl.tensor, exists_n: tl.tensor, largest_H: tl.tensor, total_H: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a tile's weights, what earlier sums are multiplied by, and the new largest score and total.

    A score of NaN gives a weight of NaN, whatever a maximum instruction does with it.
    """
    score = tl.where(exists_n[None, :], score_Hn, float("-inf"))
    largest = tl.maximum(largest_H, tl.max(score, 1))
    # Without any key and any sink the largest is -inf, and a difference of infinities NaN.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp(score - base[:, None])
    decay = tl.exp(largest_H - base)
    return weight, decay, largest, total_H * decay + tl.sum(weight, 1)


@device_function
def quotient(weighted_HC: tl.tensor, total_H: tl.tensor) -> tl.tensor:
    """Return the weighted mean; exact zeros where nothing was added, NaN kept."""
    total = total_H[:, None]
    return tl.where(total == 0.0, 0.0, weighted_HC / total)
