"""A few moves from the layout that is there: copies from experts that cooled down to those that became hot.

Legend: L layers, E experts, R ranks, K slots of one rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.parallel.packing import hand_out, most_copies
from deepinfer.parallel.shares import shares

_TAKEN = -1
_NOWHERE = np.iinfo(np.int64).max


def adapted_copies(total_LE: NDArray[np.int64], copies_LE: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Return new numbers of copies: one at a time from the expert that can best spare it to the hottest per copy.

    Nothing is hotter than need be if numbers made afresh had a copy as hot. Between hot and cool nothing changes, so
    that small changes of the load change no numbers.
    """
    layers, experts = total_LE.shape
    slots = int(copies_LE[0].sum())
    redundant = slots - experts
    fresh_LE = hand_out(total_LE, redundant, ranks, to_hottest=redundant * 5 // 8, to_scatter=redundant)
    # A copy is hot when it leaves hardly more of a rank than the lightest experts need to fill the other slots.
    lightest_L = shares(np.sort(total_LE, axis=1)[:, : slots // ranks - 1].sum(axis=1), np.int64(1))
    room_L = shares(total_LE.sum(axis=1), np.int64(ranks)) - lightest_L
    hot_L = np.maximum(shares(total_LE, fresh_LE).max(axis=1), room_L // 10 * 9)
    cool_L = hot_L // 4 * 3
    copies_LE = copies_LE.copy()
    cap = most_copies(experts, ranks, slots)
    share_LE = np.where(copies_LE < cap, shares(total_LE, copies_LE), -1)
    spared_LE = np.where(copies_LE > 1, shares(total_LE, np.maximum(copies_LE - 1, 1)), _NOWHERE)
    active = np.arange(layers)
    for _ in range(slots):
        takes, gives = share_LE[active].argmax(axis=1), spared_LE[active].argmin(axis=1)
        goes_on = (share_LE[active, takes] > hot_L[active]) & (spared_LE[active, gives] < cool_L[active])
        active, takes, gives = active[goes_on], takes[goes_on], gives[goes_on]
        if not active.size:
            break
        copies_LE[active, takes] += 1
        copies_LE[active, gives] -= 1
        for expert in (takes, gives):
            copies, total = copies_LE[active, expert], total_LE[active, expert]
            share_LE[active, expert] = np.where(copies < cap, shares(total, copies), -1)
            spared_LE[active, expert] = np.where(copies > 1, shares(total, np.maximum(copies - 1, 1)), _NOWHERE)
    return copies_LE


def replace_copies(
    layout_RK: NDArray[np.int32],
    before_E: NDArray[np.int64],
    after_E: NDArray[np.int64],
    weight_E: NDArray[np.int64],
) -> None:
    """Bring one layer's layout, in place, from the old numbers of copies to the new ones.

    Surplus copies go from the heaviest ranks; the new ones, heaviest first, fill the freed slots, each on the lightest
    rank that does not hold its expert, if there is one.
    """
    load_R = weight_E[layout_RK].sum(axis=1)
    for expert in np.flatnonzero(before_E > after_E).tolist():
        rank, slot = np.nonzero(layout_RK == expert)
        heaviest = np.argsort(-load_R[rank], kind="stable")[: before_E[expert] - after_E[expert]]
        layout_RK[rank[heaviest], slot[heaviest]] = _TAKEN
        np.subtract.at(load_R, rank[heaviest], weight_E[expert])
    needed = np.flatnonzero(after_E > before_E)
    for expert in needed[np.argsort(-weight_E[needed], kind="stable")].tolist():
        for _ in range(after_E[expert] - before_E[expert]):
            _put(layout_RK, load_R, weight_E, expert)


def _put(layout_RK: NDArray[np.int32], load_R: NDArray[np.int64], weight_E: NDArray[np.int64], expert: int) -> None:
    is_free_R = (layout_RK == _TAKEN).any(axis=1)
    holds_R = (layout_RK == expert).any(axis=1)
    is_new_R = is_free_R & ~holds_R
    rank = int(np.where(is_new_R if is_new_R.any() else is_free_R, load_R, _NOWHERE).argmin())
    slot = int((layout_RK[rank] == _TAKEN).argmax())
    if not is_new_R.any():
        # Every rank with a free slot holds the expert already: another rank takes it, and gives one of its own away.
        for other in np.argsort(load_R, kind="stable").tolist():
            can_go_K = ~np.isin(layout_RK[other], layout_RK[rank])
            if not holds_R[other] and can_go_K.any():
                given = int(can_go_K.argmax())
                leaving = layout_RK[other, given]
                layout_RK[rank, slot] = leaving
                load_R[rank] += weight_E[leaving]
                load_R[other] -= weight_E[leaving]
                rank, slot = other, given
                break
    layout_RK[rank, slot] = expert
    load_R[rank] += weight_E[expert]
