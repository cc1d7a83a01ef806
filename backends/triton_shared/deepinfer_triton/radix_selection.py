"""The k largest of integers, by their bits: four histograms find the k-th largest, one more pass collects.

Keys are order keys of scores (`number_formats.order_keys`); -2^31 does not compete. Equal keys win in ascending order
of their places. What was collected ascends because places are passed in that order. Counts are integers: no order of
anything can matter.

Legend: T rows, K wanted, n competitors.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl

from deepinfer_triton.configuration import Configuration, pointers
from deepinfer_triton.index_scores import EXCLUDED, seen_entries
from deepinfer_triton.jit import device_function, kernel

TILE = 2048
FILL = 256
_BINS = tl.constexpr(256)
_POSITIVE_INFINITY = tl.constexpr(0x7F800000)
UNALIGNED = ("position_ptr", "valid_ptr", "candidates_ptr")


@device_function
def digit_counts(
    keys_ptr: tl.tensor, limit: tl.tensor, stop: tl.tensor, prefix: tl.tensor, SHIFT: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Return how many keys have each value of one digit, among those whose higher digits are ``prefix``."""
    counts = tl.zeros((_BINS,), tl.int32)
    for start in range(stop * 0, stop, TILE):
        place = start + tl.arange(0, TILE)
        key = tl.load(keys_ptr + place, mask=place < limit, other=EXCLUDED)
        if SHIFT == 24:
            # Shifts keep the sign: the highest digit counts from -128.
            counts += tl.histogram((key >> SHIFT) + 128, _BINS)
        else:
            counts += tl.histogram((key >> SHIFT) & 255, _BINS, mask=(key >> (SHIFT + 8)) == prefix)
    return counts


@device_function
def chosen_digit(counts: tl.tensor, wanted: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the digit of the ``wanted``-th largest key, and how many larger ones there are."""
    digit = tl.arange(0, _BINS)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    chosen = tl.max(tl.where(above + counts >= wanted, digit, 0), 0)
    return chosen, tl.sum(tl.where(digit == chosen, above, 0), 0)


@kernel(unaligned=UNALIGNED)
def radix_selection_kernel(
    keys_ptr: tl.tensor,
    position_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    candidates_ptr: tl.tensor,
    out_ptr: tl.tensor,
    key_stride: tl.int64,
    first_row: tl.int64,
    ratio: tl.int32,
    size: tl.int32,
    listed: tl.int32,
    top_k: tl.int32,
    TILE: tl.constexpr,
    FILL: tl.constexpr,
    RESTRICTED: tl.constexpr,
) -> None:
    """One program a row.

    The row's competitors are all that are listed, or groups of ``size`` entries that it sees.
    """
    row = tl.program_id(0).to(tl.int64)
    keys = keys_ptr + row * key_stride
    row += first_row
    limit = (seen_entries(position_ptr, valid_ptr, row, ratio) + size - 1) // size
    if RESTRICTED:
        limit = listed
    # Lanes behind the last competitor count as keys that do not compete, so that there are always enough.
    stop = tl.maximum(limit, top_k)
    wanted = top_k
    threshold, larger = chosen_digit(digit_counts(keys, limit, stop, wanted, 24, TILE), wanted)
    threshold -= 128
    wanted -= larger
    digit, larger = chosen_digit(digit_counts(keys, limit, stop, threshold, 16, TILE), wanted)
    threshold = threshold * 256 + digit
    wanted -= larger
    digit, larger = chosen_digit(digit_counts(keys, limit, stop, threshold, 8, TILE), wanted)
    threshold = threshold * 256 + digit
    wanted -= larger
    digit, larger = chosen_digit(digit_counts(keys, limit, stop, threshold, 0, TILE), wanted)
    threshold = threshold * 256 + digit
    wanted -= larger
    out = out_ptr + row * top_k
    taken = wanted * 0
    equals = wanted * 0
    for start in range(limit * 0, limit, TILE):
        place = start + tl.arange(0, TILE)
        key = tl.load(keys + place, mask=place < limit, other=EXCLUDED)
        is_equal = (key == threshold) & (key != EXCLUDED)
        equal = is_equal.to(tl.int32)
        takes = (key > threshold) | (is_equal & (equals + tl.cumsum(equal, 0) <= wanted))
        take = takes.to(tl.int32)
        value = place
        if RESTRICTED:
            column = place // size
            block = tl.load(candidates_ptr + row * (listed // size) + column, mask=takes, other=0).to(tl.int32)
            value = block * size + (place - column * size)
        tl.store(out + taken + tl.cumsum(take, 0) - take, value.to(tl.int64), mask=takes)
        taken += tl.sum(take, 0)
        equals += tl.sum(equal, 0)
    for start in range(top_k * 0, top_k, FILL):
        place = start + tl.arange(0, FILL)
        tl.store(out + place, tl.zeros((FILL,), tl.int64) - 1, mask=(place >= taken) & (place < top_k))


@kernel(unaligned=UNALIGNED[:2])
def all_competitors_kernel(
    position_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ratio: tl.int32,
    size: tl.int32,
    top_k: tl.int32,
    FILL: tl.constexpr,
) -> None:
    """One program a row and a piece of its places, where no row has more competitors than places."""
    row = tl.program_id(0).to(tl.int64)
    limit = (seen_entries(position_ptr, valid_ptr, row, ratio) + size - 1) // size
    place = tl.program_id(1) * FILL + tl.arange(0, FILL)
    tl.store(out_ptr + row * top_k + place, tl.where(place < limit, place, -1).to(tl.int64), mask=place < top_k)


@kernel(unaligned=UNALIGNED[:2])
def block_keys_kernel(
    keys_ptr: tl.tensor,
    position_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    out_ptr: tl.tensor,
    key_stride: tl.int64,
    out_stride: tl.int64,
    first_row: tl.int64,
    ratio: tl.int32,
    size: tl.int32,
    SIZE_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One program a row and a piece of its candidate blocks: the largest key of each, infinity for the newest."""
    row = tl.program_id(0).to(tl.int64)
    seen = seen_entries(position_ptr, valid_ptr, row + first_row, ratio)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, SIZE_BLOCK)[None, :]
    place = block[:, None] * size + lane
    key = tl.load(keys_ptr + row * key_stride + place, mask=(lane < size) & (place < seen), other=EXCLUDED)
    largest = tl.where(block == (seen - 1) // size, _POSITIVE_INFINITY, tl.max(key, 1))
    tl.store(out_ptr + row * out_stride + block, largest, mask=block * size < seen)


def number_types(names: tuple[str, ...]) -> dict[str, str]:
    """Return the types of a kernel's numbers: counts have 32 bits, rows and strides 64."""
    return {name: "i32" if name in ("ratio", "size", "listed", "top_k") else "i64" for name in names}


@cache
def selection_configuration(*, restricted: bool) -> Configuration:
    """Return the configuration of the selection; it depends on nothing else."""
    integers = torch.int64
    signature = pointers(
        keys_ptr=torch.int32,
        position_ptr=integers,
        valid_ptr=torch.uint8,
        candidates_ptr=integers,
        out_ptr=integers,
    )
    numbers = ("key_stride", "first_row", "ratio", "size", "listed", "top_k")
    return Configuration(
        radix_selection_kernel,
        signature | number_types(numbers),
        {"TILE": TILE, "FILL": FILL, "RESTRICTED": restricted},
        num_warps=8,
    )


@cache
def everything_configuration() -> Configuration:
    """Return the configuration for rows that keep all that they see."""
    signature = pointers(position_ptr=torch.int64, valid_ptr=torch.uint8, out_ptr=torch.int64)
    numbers = ("ratio", "size", "top_k")
    return Configuration(all_competitors_kernel, signature | number_types(numbers), {"FILL": FILL}, num_warps=1)


@cache
def block_keys_configuration(size_block: int) -> Configuration:
    """Return the configuration for candidate blocks of up to ``size_block`` entries."""
    signature = pointers(keys_ptr=torch.int32, position_ptr=torch.int64, valid_ptr=torch.uint8, out_ptr=torch.int32)
    numbers = ("key_stride", "out_stride", "first_row", "ratio", "size")
    return Configuration(
        block_keys_kernel,
        signature | number_types(numbers),
        {"SIZE_BLOCK": size_block, "BLOCKS": max(1, FILL // size_block)},
        num_warps=1,
    )
