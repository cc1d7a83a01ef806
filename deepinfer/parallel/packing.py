"""Copies onto ranks: how many copies, a first deal, and rounds of swaps that even out the ranks, all layers at once.

Legend: L layers, E experts, R ranks, S slots of all ranks, K slots of one rank, G hot ranks, P partners of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.parallel.shares import shares

_WEIGHT_TOTAL = 2**28  # the sum of a layer's weights, so that differences of twice a rank's load fit int32


def most_copies(experts: int, ranks: int, slots: int) -> int:
    """Return how many copies an expert may have: one a rank, unless there are more slots than that can fill."""
    return max(ranks, -(-slots // experts))


def hand_out(
    total_LE: NDArray[np.int64], redundant: int, ranks: int, *, to_hottest: int, to_scatter: int
) -> NDArray[np.int64]:
    """Return copies per expert: so many to what is hottest per copy, so many against scatter, the rest to the coldest.

    The first make the largest copies small enough to be packed. The second go where load / (copies * (copies + 1)) is
    largest, which is what one more copy takes off the variance of the ranks' loads: mostly to experts that had one
    copy, which also halves what happens when such an expert becomes hot. The last make small copies, which fill ranks
    best. Ties go to the lower id.
    """
    layers, experts = total_LE.shape
    cap = most_copies(experts, ranks, experts + redundant)
    copies_LE = np.ones((layers, experts), dtype=np.int64)
    layer_L = np.arange(layers)
    against_scatter = min(to_hottest, redundant)
    to_coldest = min(against_scatter + to_scatter, redundant)
    for first, end, value in (
        (0, against_scatter, shares),
        (against_scatter, to_coldest, _saved_scatter),
        (to_coldest, redundant, _coldness),
    ):
        if first == end:
            continue
        value_LE = np.where(copies_LE < cap, value(total_LE, copies_LE), -1)
        for _ in range(first, end):
            chosen_L = value_LE.argmax(axis=1)
            copies_L = copies_LE[layer_L, chosen_L] + 1
            copies_LE[layer_L, chosen_L] = copies_L
            value_LE[layer_L, chosen_L] = np.where(copies_L < cap, value(total_LE[layer_L, chosen_L], copies_L), -1)
    return copies_LE


def _saved_scatter(total: NDArray[np.int64], copies: NDArray[np.int64]) -> NDArray[np.int64]:
    return shares(total, copies * (copies + 1))


def _coldness(total: NDArray[np.int64], copies: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what is larger for fewer copies, then for a smaller load, which a window keeps below 2^35."""
    return np.int64(2**62) - np.minimum(copies, 2**26) * 2**35 - total


def slot_weights(
    total_LE: NDArray[np.int64], copies_LE: NDArray[np.int64], lone_L: NDArray[np.int64], one: int
) -> NDArray[np.int64]:
    """Return what one copy weighs: its share, and ``lone`` / ``one`` of it over the number of copies more."""
    share_LE = shares(total_LE, copies_LE)
    per_weight_L = np.maximum(shares(total_LE.sum(axis=1), np.int64(1)) // _WEIGHT_TOTAL, 1)
    weight_LE = share_LE // per_weight_L[:, None]
    return weight_LE + weight_LE * lone_L[:, None] // (copies_LE * one)


@dataclass(slots=True, eq=False)
class Packing:
    """A layout in the making, with what its slots and ranks weigh; swaps keep an expert from meeting itself.

    Attributes:
        layout_LRK: the expert of each slot.
        weight_LRK: its weight.
        load_LR: the sum of a rank's weights.
    """

    layout_LRK: NDArray[np.int32]
    weight_LRK: NDArray[np.int32]
    load_LR: NDArray[np.int32]

    @classmethod
    def of(cls, layout_LRK: NDArray[np.int32], weight_LE: NDArray[np.int64]) -> Packing:
        """Weigh a layout, which becomes the packing's own."""
        flat_LS = layout_LRK.reshape(layout_LRK.shape[0], -1)
        weight_LRK = np.take_along_axis(weight_LE, flat_LS.astype(np.int64), axis=1).reshape(layout_LRK.shape)
        return cls(layout_LRK, weight_LRK.astype(np.int32), weight_LRK.sum(axis=2).astype(np.int32))

    @classmethod
    def dealt(cls, weight_LE: NDArray[np.int64], copies_LE: NDArray[np.int64], ranks: int) -> Packing:
        """Deal all copies, heaviest first, one to each rank in turn, the lightest rank first in each turn."""
        layers = weight_LE.shape[0]
        order_LE = np.argsort(-weight_LE, axis=1, kind="stable")
        dealt_LS = np.repeat(order_LE, np.take_along_axis(copies_LE, order_LE, axis=1).ravel()).reshape(layers, -1)
        turns = dealt_LS.shape[1] // ranks
        layout_LRK = np.empty((layers, ranks, turns), dtype=np.int32)
        load_LR = np.zeros((layers, ranks), dtype=np.int64)
        layer_L1 = np.arange(layers)[:, None]
        for turn in range(turns):
            expert_LR = dealt_LS[:, turn * ranks : (turn + 1) * ranks]
            rank_LR = np.argsort(load_LR, axis=1, kind="stable")
            if turn:
                # The copies of one expert lie side by side; those that begin this turn must not follow those that
                # ended the last one onto the same ranks.
                holds_LR = layout_LRK[:, :, turn - 1] == expert_LR[:, :1]
                follows_LR = np.take_along_axis(holds_LR, rank_LR, axis=1)
                rank_LR = np.take_along_axis(rank_LR, np.argsort(follows_LR, axis=1, kind="stable"), axis=1)
            layout_LRK[layer_L1, rank_LR, turn] = expert_LR
            load_LR[layer_L1, rank_LR] += np.take_along_axis(weight_LE, expert_LR, axis=1)
        return cls.of(layout_LRK, weight_LE)

    def of_layers(self, layers: NDArray[np.int64]) -> Packing:
        """Return copies of some layers."""
        return Packing(self.layout_LRK[layers], self.weight_LRK[layers], self.load_LR[layers])

    def limits(self, excess_L: NDArray[np.int64], one: int) -> NDArray[np.int64]:
        """Return the mean load of a rank and ``excess`` / ``one`` of it more."""
        mean_L = self.load_LR.sum(axis=1, dtype=np.int64) // self.load_LR.shape[1]
        limits: NDArray[np.int64] = mean_L + mean_L * excess_L // one
        return limits

    def excesses(self, one: int) -> NDArray[np.int64]:
        """Return by how much the busiest rank is above the mean, in 1 / ``one`` of the mean."""
        mean_L = np.maximum(self.load_LR.sum(axis=1, dtype=np.int64) // self.load_LR.shape[1], 1)
        excess: NDArray[np.int64] = (self.load_LR.max(axis=1) - mean_L) * one // mean_L
        return excess

    def even_out(self, limit_L: NDArray[np.int64], *, pair_rounds: int, group_rounds: int) -> None:
        """Swap slots between ranks until no rank of a layer is above its limit, or no more is found in time.

        In a pair round each rank of the hotter half has one partner in the colder half; in a group round the hottest
        eighth of the ranks shares all others. Partners shift from round to round.
        """
        ranks = self.load_LR.shape[1]
        if ranks == 1:
            return
        hots = [ranks // 2] * pair_rounds + [max(1, ranks // 8)] * group_rounds
        fruitless_L = np.zeros(limit_L.size, dtype=np.int64)
        for turn, hot in enumerate(hots):
            layers = np.flatnonzero((self.load_LR.max(axis=1) > limit_L) & (fruitless_L <= ranks // hot))
            if not layers.size:
                continue  # a layer that gave up in pairs looks again in groups, whether or not others still do
            # Most best swaps are allowed, and asking is dear: only layers that had none in the last round ask first.
            for asks_first in (False, True):
                some = layers[(fruitless_L[layers] > 0) == asks_first]
                if some.size:
                    is_swapped_L = self._swap_round(
                        some, limit_L, hot=hot, partners=ranks // hot - 1, shift=turn, asks_first=asks_first
                    )
                    fruitless_L[some] = np.where(is_swapped_L[some], 0, fruitless_L[some] + 1)

    def _swap_round(
        self,
        layers: NDArray[np.int64],
        limit_L: NDArray[np.int64],
        *,
        hot: int,
        partners: int,
        shift: int,
        asks_first: bool,
    ) -> NDArray[np.bool_]:
        """Let each of the hottest ranks do its best swap with one of its own partners; return where some were done.

        Only ranks above their limit (H of them, over all layers) look for one. All pairs of slots of all pairs of ranks
        are compared with the ranks innermost, where numpy is quick.
        """
        order_AR = np.argsort(self.load_LR[layers], axis=1, kind="stable")
        hot_AG = order_AR[:, : -hot - 1 : -1]
        at_H, group_H = np.nonzero(self.load_LR[layers[:, None], hot_AG] > limit_L[layers, None])
        layer_H, hot_H = layers[at_H], hot_AG[at_H, group_H]
        place_PH = (np.arange(partners)[:, None] * hot + group_H - shift) % (hot * partners)
        cold_PH = order_AR[at_H, place_PH]
        gap_PH = self.load_LR[layer_H, hot_H] - self.load_LR[layer_H, cold_PH]
        taken_KPH = np.ascontiguousarray(self.weight_LRK[layer_H, cold_PH].transpose(2, 0, 1))
        given_KH = np.ascontiguousarray(self.weight_LRK[layer_H, hot_H].T)
        # Moving d from hot to cold makes the heavier of the two ((hot + cold) + |2 d - gap|) / 2.
        miss_KKPH = (2 * given_KH[:, None] - gap_PH)[:, None] - 2 * taken_KPH
        np.abs(miss_KKPH, out=miss_KKPH)
        if asks_first:
            expert_KH = self.layout_LRK[layer_H, hot_H].T
            other_KPH = self.layout_LRK[layer_H, cold_PH].transpose(2, 0, 1)
            is_same = expert_KH[:, None, None] == other_KPH
            miss_KKPH[is_same.any(axis=1)[:, None] | is_same.any(axis=0)] = np.iinfo(np.int32).max
        slots = miss_KKPH.shape[0]
        miss_QPH = miss_KKPH.reshape(slots * slots, *cold_PH.shape)
        least_PH = miss_QPH.min(axis=0)
        change_PH = least_PH - gap_PH
        partner_H = change_PH.argmin(axis=0)
        helps = np.flatnonzero(change_PH[partner_H, np.arange(partner_H.size)] < 0)
        partner_H = partner_H[helps]
        pair_H = (miss_QPH[:, partner_H, helps] == least_PH[partner_H, helps]).argmax(axis=0)
        return self._swap(layer_H[helps], hot_H[helps], pair_H // slots, cold_PH[partner_H, helps], pair_H % slots)

    def _swap(
        self,
        layer: NDArray[np.int64],
        rank: NDArray[np.int64],
        slot: NDArray[np.int64],
        other_rank: NDArray[np.int64],
        other_slot: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Swap slots of disjoint ranks, unless an expert would meet itself; return in which layers one was done."""
        expert, other = self.layout_LRK[layer, rank, slot], self.layout_LRK[layer, other_rank, other_slot]
        meets = (self.layout_LRK[layer, other_rank] == expert[:, None]).any(axis=1)
        meets |= (self.layout_LRK[layer, rank] == other[:, None]).any(axis=1)
        kept = np.flatnonzero(~meets)
        layer, rank, slot, other_rank, other_slot = (each[kept] for each in (layer, rank, slot, other_rank, other_slot))
        weight, other_weight = self.weight_LRK[layer, rank, slot], self.weight_LRK[layer, other_rank, other_slot]
        self.layout_LRK[layer, rank, slot], self.layout_LRK[layer, other_rank, other_slot] = other[kept], expert[kept]
        self.weight_LRK[layer, rank, slot], self.weight_LRK[layer, other_rank, other_slot] = other_weight, weight
        self.load_LR[layer, rank] += other_weight - weight
        self.load_LR[layer, other_rank] += weight - other_weight
        is_swapped_L = np.zeros(self.load_LR.shape[0], dtype=np.bool_)
        is_swapped_L[layer] = True
        return is_swapped_L
