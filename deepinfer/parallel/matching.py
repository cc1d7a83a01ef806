"""Ranks of a new layout are interchangeable: give each the number, and each expert the slot, that moves least.

Legend: L layers, E experts, R ranks, K slots of one rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def relabelled(new_LRK: NDArray[np.int32], old_LRK: NDArray[np.int32], experts: int) -> NDArray[np.int32]:
    """Return the new layout with ranks renumbered so that they overlap the old ones, the largest overlaps first."""
    layers, ranks, _ = new_LRK.shape
    layer_L = np.arange(layers)
    overlap_LOR = _overlaps(old_LRK, new_LRK, experts)
    flat = overlap_LOR.reshape(layers, -1)
    result = np.empty_like(new_LRK)
    for _ in range(ranks):
        best_L = flat.argmax(axis=1)
        old_L, new_L = best_L // ranks, best_L % ranks
        result[layer_L, old_L] = new_LRK[layer_L, new_L]
        overlap_LOR[layer_L, old_L] = -1
        overlap_LOR[layer_L, :, new_L] = -1
    return in_old_places(result, old_LRK)


def in_old_places(new_LRK: NDArray[np.int32], old_LRK: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the new layout with each rank's slots reordered: an expert that stays on its rank stays in its slot."""
    result = np.full_like(new_LRK, -1)
    left = new_LRK.copy()
    for slot in range(new_LRK.shape[2]):
        matches = left == old_LRK[:, :, slot, None]
        layer, rank = np.nonzero(matches.any(axis=2))
        result[layer, rank, slot] = old_LRK[layer, rank, slot]
        left[layer, rank, matches[layer, rank].argmax(axis=1)] = -1
    # What is left fills the open slots of its rank, both in order.
    open_first = np.argsort(result >= 0, axis=2, kind="stable")
    left_first = np.argsort(left < 0, axis=2, kind="stable")
    placed = np.take_along_axis(result, open_first, axis=2)
    filled = np.where(placed < 0, np.take_along_axis(left, left_first, axis=2), placed)
    np.put_along_axis(result, open_first, filled, axis=2)
    return result


def _overlaps(old_LRK: NDArray[np.int32], new_LRK: NDArray[np.int32], experts: int) -> NDArray[np.signedinteger]:
    """Return how many experts each old rank shares with each new one [L, O, N], in bytes where they can hold it."""
    layers, ranks, slots = new_LRK.shape
    layer_L11 = np.arange(layers)[:, None, None]
    counter = np.int8 if slots <= np.iinfo(np.int8).max else np.int32
    # One row more than there are experts, which no rank holds, for what an old rank holds a second time.
    held_LER = np.zeros((layers, experts + 1, ranks), dtype=counter)
    held_LER[layer_L11, new_LRK, np.arange(ranks)[:, None]] = 1
    overlap_LOR = np.zeros((layers, ranks, ranks), dtype=counter)
    for slot in range(slots):
        expert_LR = old_LRK[:, :, slot]
        is_repeated_LR = (old_LRK[:, :, :slot] == expert_LR[:, :, None]).any(axis=2)
        overlap_LOR += held_LER[layer_L11[:, :, 0], np.where(is_repeated_LR, experts, expert_LR)]
    return overlap_LOR
