"""The described engine's policy, for comparison: hand out copies, then place them, each step the best next one.

Legend: T steps, L layers, E experts, R ranks, S slots of all ranks, K slots of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout
from deepinfer.parallel.policy import check_inputs
from deepinfer.parallel.shares import shares

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class GreedyPolicy:
    """Plans every layer anew from the whole window, and asks neither what is there nor whether it is better.

    Two copies of one expert may share a rank. Layers without load keep their layout, which is our addition.
    """

    name: str = "greedy"

    def plan(self, window: LoadWindow, layout_LS: Layout, ranks: int) -> Layout:
        """Return a new layout for every layer that has load."""
        check_inputs(window, layout_LS, ranks)
        loads_LET = np.ascontiguousarray(window.counts_TLE.transpose(1, 2, 0))
        planned_LS = _place(loads_LET, _hand_out(loads_LET, layout_LS.shape[1]), ranks)
        is_idle_L = ~loads_LET.any(axis=(1, 2))
        planned_LS[is_idle_L] = layout_LS[is_idle_L]
        return planned_LS


def _hand_out(loads_LET: NDArray[np.int64], slots: int) -> NDArray[np.int64]:
    """Return the expert of each slot [L, S]: all experts once, then the copies in the order of handing out.

    Each copy goes to the expert for which the sum over steps of the hottest single copy becomes smallest. Where that
    is the same for all of several experts, the hottest per copy gets it, then the lowest id.
    """
    layers, experts, steps = loads_LET.shape
    layer_L, step_T = np.arange(layers), np.arange(steps)
    copies_LE = np.ones((layers, experts), dtype=np.int64)
    total_LE = loads_LET.sum(axis=2)
    share_LET = shares(loads_LET, copies_LE[:, :, None])
    slots_LS = np.empty((layers, slots), dtype=np.int64)
    slots_LS[:, :experts] = np.arange(experts)
    for slot in range(experts, slots):
        # Only the hottest expert of a step can make that step's hottest copy smaller; the second hottest bounds it.
        hottest_LT = share_LET.argmax(axis=1)
        top_LT = np.take_along_axis(share_LET, hottest_LT[:, None], axis=1)[:, 0]
        np.put_along_axis(share_LET, hottest_LT[:, None], -1, axis=1)
        second_LT = share_LET.max(axis=1)
        np.put_along_axis(share_LET, hottest_LT[:, None], top_LT[:, None], axis=1)
        halved_LT = shares(
            loads_LET[layer_L[:, None], hottest_LT, step_T], np.take_along_axis(copies_LE, hottest_LT, axis=1) + 1
        )
        saved_LT = top_LT - np.maximum(halved_LT, second_LT)
        is_same_LTT = hottest_LT[:, :, None] == hottest_LT[:, None, :]
        saved_LE = np.zeros((layers, experts), dtype=np.int64)
        np.put_along_axis(saved_LE, hottest_LT, (is_same_LTT * saved_LT[:, None, :]).sum(axis=2), axis=1)
        is_best_LE = saved_LE == saved_LE.max(axis=1)[:, None]
        chosen_L = np.where(is_best_LE, shares(total_LE, copies_LE), -1).argmax(axis=1)
        slots_LS[:, slot] = chosen_L
        copies_LE[layer_L, chosen_L] += 1
        share_LET[layer_L, chosen_L] = shares(loads_LET[layer_L, chosen_L], copies_LE[layer_L, chosen_L, None])
    return slots_LS


def _place(loads_LET: NDArray[np.int64], slots_LS: NDArray[np.int64], ranks: int) -> Layout:
    """Return the layout: copies heaviest first, ties in slot order, each where the busiest ranks' sum stays smallest.

    Ties go to the lower rank; a full rank takes no more.
    """
    layers, experts, steps = loads_LET.shape
    slots = slots_LS.shape[1]
    slots_per_rank = slots // ranks
    layer_L = np.arange(layers)
    copies_LE = np.bincount((slots_LS + experts * layer_L[:, None]).ravel(), minlength=layers * experts)
    copies_LE = copies_LE.reshape(layers, experts)
    total_LS = np.take_along_axis(shares(loads_LET.sum(axis=2), copies_LE), slots_LS, axis=1)
    ordered_LS = np.take_along_axis(slots_LS, np.argsort(-total_LS, axis=1, kind="stable"), axis=1)
    share_LET = shares(loads_LET, copies_LE[:, :, None])
    load_LRT = np.zeros((layers, ranks, steps), dtype=np.int64)
    busiest_LT = np.zeros((layers, steps), dtype=np.int64)
    taken_LR = np.zeros((layers, ranks), dtype=np.int64)
    layout_LRK = np.empty((layers, ranks, slots_per_rank), dtype=np.int32)
    for place in range(slots):
        expert_L = ordered_LS[:, place]
        share_LT = share_LET[layer_L, expert_L]
        score_LR = np.maximum(load_LRT + share_LT[:, None], busiest_LT[:, None]).sum(axis=2)
        score_LR[taken_LR == slots_per_rank] = _NEVER
        rank_L = score_LR.argmin(axis=1)
        load_LRT[layer_L, rank_L] += share_LT
        busiest_LT = np.maximum(busiest_LT, load_LRT[layer_L, rank_L])
        layout_LRK[layer_L, rank_L, taken_LR[layer_L, rank_L]] = expert_L
        taken_LR[layer_L, rank_L] += 1
    return layout_LRK.reshape(layers, slots)
