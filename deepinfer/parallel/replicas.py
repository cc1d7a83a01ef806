"""Which copy of an expert serves a row.

The rule looks at the row's own content alone: its token id, its position in its request, and the expert. It does not
see the batch, the row's place in it, the rank or the time, so the same token of the same request goes to the same copy
in every batch. Rows of different requests that stand at the same position spread, because their tokens differ; rows of
one prompt spread, because their positions differ.

That a choice moves no bit (R3) does not even rest on this rule. Three facts carry it: copies hold equal bytes
(``exchange`` moves weights and scales together, and the maps switch in one step); an expert's output for a row does
not depend on other rows (R2 of ``experts.routed``); and outputs come back slot by slot, [T, k, D], and are added in
top-k order on the row's own rank (``experts.combine``), never first on the expert's rank. The rule adds that even the
addressee of every row is the same whatever the batch.

Legend: N rows, k experts per token, E experts, C copies. Works alike on numpy arrays and torch tensors of int64.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Integers = TypeVar("Integers", NDArray[np.int64], torch.Tensor)

_MASK = 2**31 - 1


def row_keys(token_ids_N: Integers, positions_N: Integers) -> Integers:
    """Return a number of 31 bits for each row, from its token id and its position in its request."""
    return _mixed(_mixed(token_ids_N) + positions_N)


def choose_slots(experts_Nk: Integers, keys_N: Integers, copies_E: Integers, slots_EC: Integers) -> Integers:
    """Return the slot that computes each row's experts in one layer; -1 where there is no expert.

    Args:
        experts_Nk: the router's choice, -1 for rows that are padding.
        keys_N: from ``row_keys``.
        copies_E: slots of each expert.
        slots_EC: these slots; entries after the last copy are never read.
    """
    is_routed_Nk = experts_Nk >= 0
    known_Nk = experts_Nk * is_routed_Nk
    hashed_Nk = _mixed(keys_N[:, None] ^ _mixed(known_Nk + 1))
    # 31 bits times the number of copies, without the last 31: equally many keys for every copy, but for rounding.
    copy_Nk = hashed_Nk * copies_E[known_Nk] >> 31
    slots_Nk: Integers = slots_EC[known_Nk, copy_Nk] * is_routed_Nk + (is_routed_Nk * 1 - 1)
    return slots_Nk


def _mixed(number: Integers) -> Integers:
    """Return 31 well-mixed bits; no product leaves 63 bits, so numpy and torch agree."""
    bits = number & _MASK
    bits = (bits ^ (bits >> 15)) * 0x2C1B3C6D & _MASK
    bits = (bits ^ (bits >> 12)) * 0x297A2D39 & _MASK
    return bits ^ (bits >> 15)
