"""Copies and zeroes whole items of byte pools: cache blocks, state slots, records.

Copies are made in words of up to four bytes; an item's place may be beyond 2^31 bytes.

Legend: n moved items, N items of a pool, w words of an item.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.configuration import Configuration, launch, pointers, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import consecutive
from deepinfer_triton.sizes import ModelSizes

BLOCKS = (256, 2048)
"""Words that one program moves: of records, and of cache blocks and state slots."""

WORDS = (torch.uint8, torch.int16, torch.int32)


@kernel(unaligned=("source_ptr", "target_ptr", "source_item_ptr", "target_item_ptr"))
def item_copy_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    source_item_ptr: tl.tensor,
    target_item_ptr: tl.tensor,
    source_stride: tl.int64,
    target_stride: tl.int64,
    target_inner_stride: tl.int64,
    target_inner_count: tl.int64,
    words: tl.int64,
    BLOCK: tl.constexpr,
    SOURCE_BY_ITEM: tl.constexpr,
    TARGET_BY_ITEM: tl.constexpr,
) -> None:
    """One program an item and a block of its words; without item numbers item n is row n; target -1 is left out."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    target = row
    if SOURCE_BY_ITEM:
        source = tl.load(source_item_ptr + row)
    if TARGET_BY_ITEM:
        target = tl.load(target_item_ptr + row)
    stored = target >= 0
    known = tl.where(stored, target, 0)
    outer = known // target_inner_count
    inner = known - outer * target_inner_count
    word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (word < words) & stored
    value = tl.load(source_ptr + source * source_stride + word, mask=inside, other=0)
    tl.store(target_ptr + outer * target_stride + inner * target_inner_stride + word, value, mask=inside)


@kernel(unaligned=("target_ptr", "target_item_ptr"))
def item_zero_kernel(
    target_ptr: tl.tensor,
    target_item_ptr: tl.tensor,
    target_stride: tl.int64,
    words: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """One program an item and a block of its words."""
    target = tl.load(target_item_ptr + tl.program_id(0))
    word = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + target * target_stride + word, tl.zeros((BLOCK,), tl.int32), mask=word < words)


def block_for(words: int) -> int:
    """Return how many words of an item one program moves."""
    small, large = BLOCKS
    return small if words <= small else large


@cache
def copy_configuration(word: torch.dtype, block: int, *, source_by_item: bool, target_by_item: bool) -> Configuration:
    """Return the configuration of a copy in words of one dtype."""
    signature = pointers(source_ptr=word, target_ptr=word, source_item_ptr=torch.int64, target_item_ptr=torch.int64)
    numbers = ("source_stride", "target_stride", "target_inner_stride", "target_inner_count", "words")
    constants = {"BLOCK": block, "SOURCE_BY_ITEM": source_by_item, "TARGET_BY_ITEM": target_by_item}
    return Configuration(
        item_copy_kernel, signature | dict.fromkeys(numbers, "i64"), constants, num_warps=min(4, warps_for(block))
    )


@cache
def zero_configuration(word: torch.dtype, block: int) -> Configuration:
    """Return the configuration of a fill in words of one dtype."""
    signature = pointers(target_ptr=word, target_item_ptr=torch.int64)
    return Configuration(
        item_zero_kernel,
        {**signature, "target_stride": "i64", "words": "i64"},
        {"BLOCK": block},
        num_warps=min(4, warps_for(block)),
    )


def configurations(_: ModelSizes) -> Iterator[Configuration]:
    """Yield every word and block that any item may need; sizes of models do not matter."""
    for word in WORDS:
        for block in BLOCKS:
            for source_by_item, target_by_item in ((False, True), (True, False), (True, True)):
                yield copy_configuration(word, block, source_by_item=source_by_item, target_by_item=target_by_item)
            yield zero_configuration(word, block)


def copy_items(
    source: Tensor,
    target: Tensor,
    words: int,
    *,
    source_item_n: Tensor | None = None,
    target_item_n: Tensor | None = None,
) -> None:
    """Copy ``words`` words of items; either side may be chosen by number, -1 in the target leaves an item out.

    Args:
        source: words [N, w].
        target: words [N, w], or [N, E, w] with flat numbers ``n * E + e``.
        words: words of an item.
        source_item_n: int64 [n], None: row n is item n.
        target_item_n: int64 [n], likewise.
    """
    chosen = [items for items in (source_item_n, target_item_n) if items is not None]
    count = chosen[0].shape[0]
    source_items = consecutive(source_item_n if source_item_n is not None else chosen[0])
    target_items = consecutive(target_item_n if target_item_n is not None else chosen[0])
    nested = target.dim() == 3
    block = block_for(words)
    launch(
        copy_configuration(
            source.dtype, block, source_by_item=source_item_n is not None, target_by_item=target_item_n is not None
        ),
        (count, -(-words // block)),
        source,
        target,
        source_items,
        target_items,
        source.stride(0),
        target.stride(0),
        target.stride(1) if nested else 0,
        target.shape[1] if nested else 1,
        words,
    )


def zero_items(target: Tensor, words: int, target_item_n: Tensor) -> None:
    """Fill items [N, w] with zero words."""
    block = block_for(words)
    launch(
        zero_configuration(target.dtype, block),
        (target_item_n.shape[0], -(-words // block)),
        target,
        consecutive(target_item_n),
        target.stride(0),
        words,
    )
