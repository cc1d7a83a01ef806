"""Which slots each expert works on, in tiles of a few slots, found on the device: the host waits for nothing.

Slot ``t * k + j`` is row t's j-th choice. Slots are sorted by expert, ascending within one, and cut into tiles that
never span two experts. The launch grid holds the most tiles that any routing can need; unused ones have expert -1.

Legend: n slots, E experts, i tiles.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import consecutive

BLOCK = 1024
TILE_BLOCK = 128


@kernel(unaligned=("expert_ptr",))
def expert_counts_kernel(expert_ptr: tl.tensor, counts_ptr: tl.tensor, slots: tl.int64, BLOCK: tl.constexpr) -> None:
    """One program an expert."""
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        found += (tl.load(expert_ptr + slot, mask=slot < slots, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@kernel(unaligned=("expert_ptr",))
def expert_tiles_kernel(
    expert_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_first_ptr: tl.tensor,
    tile_last_ptr: tl.tensor,
    slots: tl.int64,
    tiles: tl.int64,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
) -> None:
    """One program an expert, and a last one that marks the tiles which nobody needs."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERT_BLOCK)
    counts = tl.load(counts_ptr + other, mask=other < EXPERTS, other=0)
    earlier = other < expert
    needed = (counts + ROWS - 1) // ROWS
    first_slot = tl.sum(tl.where(earlier, counts, 0), 0)
    first_tile = tl.sum(tl.where(earlier, needed, 0), 0)
    own = tl.sum(tl.where(other == expert, counts, 0), 0)
    place = first_slot
    if own > 0:
        for start in range(0, slots, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            chosen = tl.load(expert_ptr + slot, mask=slot < slots, other=-1) == expert
            rank = tl.cumsum(chosen.to(tl.int32), 0)
            tl.store(order_ptr + place + rank - 1, slot.to(tl.int32), mask=chosen)
            place += tl.sum(chosen.to(tl.int32), 0)
    is_last = expert == EXPERTS
    count = tl.where(is_last, tiles.to(tl.int32) - first_tile, (own + ROWS - 1) // ROWS)
    for start in range(0, count, TILE_BLOCK):
        number = start + tl.arange(0, TILE_BLOCK)
        inside = number < count
        tile = first_tile + number
        tl.store(tile_expert_ptr + tile, tl.where(is_last, -1, expert) + number * 0, mask=inside)
        tl.store(tile_first_ptr + tile, first_slot + number * ROWS, mask=inside)
        tl.store(tile_last_ptr + tile, first_slot + own + number * 0, mask=inside)


@cache
def counts_configuration() -> Configuration:
    """Return the one configuration that counts slots."""
    signature = pointers(expert_ptr=torch.int64, counts_ptr=torch.int32)
    return Configuration(expert_counts_kernel, {**signature, "slots": "i64"}, {"BLOCK": BLOCK})


@cache
def tiles_configuration(experts: int, rows: int) -> Configuration:
    """Return the configuration for so many experts and tiles of so many slots."""
    words = torch.int32
    signature = pointers(
        expert_ptr=torch.int64,
        counts_ptr=words,
        order_ptr=words,
        tile_expert_ptr=words,
        tile_first_ptr=words,
        tile_last_ptr=words,
    )
    constants = {
        "EXPERTS": experts,
        "EXPERT_BLOCK": power_of_two(experts),
        "ROWS": rows,
        "BLOCK": BLOCK,
        "TILE_BLOCK": TILE_BLOCK,
    }
    return Configuration(expert_tiles_kernel, {**signature, "slots": "i64", "tiles": "i64"}, constants)


class ExpertTiles(NamedTuple):
    """Tiles of slots.

    Attributes:
        order_n: int32, slots by expert; places beyond the routed ones are undefined.
        expert_i: int32, the expert of each tile, or -1.
        first_i: int32, where in ``order_n`` it begins.
        last_i: int32, and where its expert's slots end.
        launched: how many tiles a launch has.
    """

    order_n: Tensor
    expert_i: Tensor
    first_i: Tensor
    last_i: Tensor
    launched: int


def most_tiles(slots: int, experts: int, rows: int) -> int:
    """Return how many tiles any routing of so many slots can need."""
    return min(slots, slots // rows + min(experts, slots))


def expert_tiles(experts_Tk: Tensor, experts: int, rows: int) -> ExpertTiles:
    """Return the tiles of int64 choices [T, k]; -1 and what is no expert lies in none."""
    expert_n = consecutive(experts_Tk.reshape(-1))
    slots, device = expert_n.shape[0], expert_n.device
    tiles = most_tiles(slots, experts, rows)
    order_n = torch.empty(slots, dtype=torch.int32, device=device)
    counts_E = torch.empty(experts, dtype=torch.int32, device=device)
    expert_i, first_i, last_i = (torch.empty(tiles, dtype=torch.int32, device=device) for _ in range(3))
    launch(counts_configuration(), (experts,), expert_n, counts_E, slots)
    chosen = tiles_configuration(experts, rows)
    launch(chosen, (experts + 1,), expert_n, counts_E, order_n, expert_i, first_i, last_i, slots, tiles)
    return ExpertTiles(order_n, expert_i, first_i, last_i, tiles)
