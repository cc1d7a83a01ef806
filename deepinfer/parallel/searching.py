"""The layout that a window asks for, chance left aside: a nearby one if that does it, else one made anew.

Legend: L layers, E experts, R ranks, S slots of all ranks, K slots of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.parallel.adapting import adapted_copies, replace_copies
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.matching import in_old_places, relabelled
from deepinfer.parallel.noise import ONE, cautious, dispersions, lone_copy_weight, relative_scatter
from deepinfer.parallel.packing import Packing, hand_out, slot_weights
from deepinfer.parallel.placement import Layout, copies_of
from deepinfer.parallel.shares import SHARE_UNIT, busiest_loads

_WAYS: Final = ((2, 4), (2, 6), (3, 5), (4, 4), (5, 3), (6, 2), (8, 0), (5, 0), (3, 0), (0, 0))
"""Eighths of the redundant slots to the hottest experts and against scatter, the rest to the coldest; where one fails,
the next is tried.

The first leaves a quarter to the coldest, as a reserve against drift. Any expert may become hot, and a second copy
halves that; but where a lone copy was heavy before, the rest of its rank is light and has room. The reserve is taken
from what saves the least scatter, so that it costs next to nothing while nothing changes, and it is given away first.
"""
_NEVER: Final = np.iinfo(np.int64).max
_GOOD: Final = ONE // 2**7
_EVEN: Final = ONE // 2**13


@dataclass(frozen=True, slots=True)
class _Demand:
    """What a window asks for, layer by layer.

    Attributes:
        total_LE: the load of each expert.
        lone_L: how much heavier an expert with one copy counts, in 1 / ONE.
        scatter_L: standard deviation over mean of a rank's load in the whole window, in 1 / ONE.
    """

    total_LE: NDArray[np.int64]
    lone_L: NDArray[np.int64]
    scatter_L: NDArray[np.int64]

    @classmethod
    def of(cls, window: LoadWindow, ranks: int) -> _Demand:
        total_LE = window.totals()
        layers = list(zip(dispersions(window).tolist(), total_LE.sum(axis=1).tolist(), strict=True))
        lone = [lone_copy_weight(dispersion, tokens // window.steps, ranks) for dispersion, tokens in layers]
        scatter = [relative_scatter(cautious(dispersion, steps=2), tokens, ranks) for dispersion, tokens in layers]
        return cls(total_LE, np.array(lone, dtype=np.int64), np.array(scatter, dtype=np.int64))

    def of_layers(self, layers: NDArray[np.int64]) -> _Demand:
        return _Demand(self.total_LE[layers], self.lone_L[layers], self.scatter_L[layers])


@dataclass(frozen=True, slots=True)
class _Handed:
    """Copies handed out in one way, and what each weighs."""

    copies_LE: NDArray[np.int64]
    weight_LE: NDArray[np.int64]
    ranks: int

    @classmethod
    def out(cls, demand: _Demand, redundant: int, ranks: int, way: tuple[int, int]) -> _Handed:
        to_hottest = redundant * way[0] // 8
        to_coldest = redundant * (8 - sum(way)) // 8
        to_scatter = redundant - to_hottest - to_coldest if way[1] else 0
        copies_LE = hand_out(demand.total_LE, redundant, ranks, to_hottest=to_hottest, to_scatter=to_scatter)
        return cls(copies_LE, slot_weights(demand.total_LE, copies_LE, demand.lone_L, ONE), ranks)

    def of_layers(self, layers: NDArray[np.bool_]) -> _Handed:
        return _Handed(self.copies_LE[layers], self.weight_LE[layers], self.ranks)

    def least_excesses(self, slots_per_rank: int) -> NDArray[np.int64]:
        """Return a bound in 1 / ONE: somewhere the heaviest copy shares a rank with at best the lightest experts."""
        mean_L = np.maximum((self.weight_LE * self.copies_LE).sum(axis=1) // self.ranks, 1)
        lightest_L = np.sort(self.weight_LE, axis=1)[:, : slots_per_rank - 1].sum(axis=1)
        bounds: NDArray[np.int64] = (self.weight_LE.max(axis=1) + lightest_L - mean_L) * ONE // mean_L
        return bounds


@dataclass(frozen=True, slots=True)
class Search:
    """Searches layouts for a number of ranks.

    Attributes:
        ranks: ranks that share the slots.
        move_cost_permille: gain in thousandths that moving all slots must earn.
    """

    ranks: int
    move_cost_permille: int

    def best(self, window: LoadWindow, layout_LS: Layout) -> Layout:
        """Return the layout to change to; it may be the same, and need not be better."""
        demand = _Demand.of(window, self.ranks)
        slots = layout_LS.shape[1]
        result_LS = layout_LS.copy()
        # A layout that no load has shaped is no place to stay near to.
        is_shaped_L = (layout_LS != np.arange(slots) % window.experts).any(axis=1)
        shaped, others = np.flatnonzero(is_shaped_L), np.flatnonzero(~is_shaped_L)
        if shaped.size:
            near_LS, is_settled_L = self._nearby(demand.of_layers(shaped), layout_LS[shaped])
            result_LS[shaped] = near_LS
            rest = shaped[~is_settled_L]
            if rest.size:
                anew_LS = self._anew(demand.of_layers(rest), layout_LS[rest])
                is_worth_it = self._is_worth_it(window.of_layers(rest), layout_LS[rest], result_LS[rest], anew_LS)
                result_LS[rest[is_worth_it]] = anew_LS[is_worth_it]
        if others.size:
            result_LS[others] = self._anew(demand.of_layers(others), layout_LS[others])
        return result_LS

    def _nearby(self, demand: _Demand, layout_LS: Layout) -> tuple[Layout, NDArray[np.bool_]]:
        """Return layouts a few moves away, and whether they leave no more than chance explains."""
        layers, experts = demand.total_LE.shape
        old_LRK = layout_LS.reshape(layers, self.ranks, -1)
        before_LE = copies_of(layout_LS, experts)
        after_LE = adapted_copies(demand.total_LE, before_LE, self.ranks)
        weight_LE = slot_weights(demand.total_LE, after_LE, demand.lone_L, ONE)
        near_LRK = old_LRK.copy()
        for layer in np.flatnonzero((before_LE != after_LE).any(axis=1)).tolist():
            replace_copies(near_LRK[layer], before_LE[layer], after_LE[layer], weight_LE[layer])
        near = Packing.of(near_LRK, weight_LE)
        limit_L = near.limits(np.maximum(2 * demand.scatter_L, _EVEN), ONE)
        near.even_out(limit_L, pair_rounds=0, group_rounds=24)
        is_settled_L = near.load_LR.max(axis=1) <= limit_L
        return in_old_places(near.layout_LRK, old_LRK).reshape(layers, -1), is_settled_L

    def _anew(self, demand: _Demand, layout_LS: Layout) -> Layout:
        """Return layouts from nothing, renumbered to overlap the old ones."""
        layers, experts = demand.total_LE.shape
        old_LRK = layout_LS.reshape(layers, self.ranks, -1)
        redundant = layout_LS.shape[1] - experts
        found_LRK = np.empty_like(old_LRK)
        excess_L = np.full(layers, _NEVER)
        good_L = np.maximum(demand.scatter_L, _GOOD)
        # First the ways that may do well by a layer, until one does; where none did, every way that may do better.
        for may_do_well, way in [*((True, way) for way in _WAYS), *((False, way) for way in _WAYS)]:
            rest = np.flatnonzero(excess_L > good_L)
            if not rest.size:
                break
            handed = _Handed.out(demand.of_layers(rest), redundant, self.ranks, way)
            least_excess = handed.least_excesses(old_LRK.shape[2])
            is_tried = least_excess <= good_L[rest] if may_do_well else least_excess < excess_L[rest]
            rest, handed = rest[is_tried], handed.of_layers(is_tried)
            if not rest.size:
                continue
            packing = self._packed(handed, demand.scatter_L[rest])
            excess = packing.excesses(ONE)
            is_better = excess < excess_L[rest]
            found_LRK[rest[is_better]] = packing.layout_LRK[is_better]
            excess_L[rest] = np.minimum(excess, excess_L[rest])
        return relabelled(found_LRK, old_LRK, experts).reshape(layers, -1)

    def _packed(self, handed: _Handed, scatter_L: NDArray[np.int64]) -> Packing:
        packing = Packing.dealt(handed.weight_LE, handed.copies_LE, self.ranks)
        limit_L = packing.limits(np.maximum(scatter_L // 8, _EVEN), ONE)
        packing.even_out(limit_L, pair_rounds=8, group_rounds=24)
        return packing

    def _is_worth_it(self, window: LoadWindow, old_LS: Layout, near_LS: Layout, anew_LS: Layout) -> NDArray[np.bool_]:
        """Say where the new layout gains more over the nearby one than its additional moves cost."""
        saved_TL = busiest_loads(window, near_LS, self.ranks) - busiest_loads(window, anew_LS, self.ranks)
        more_L = (anew_LS != old_LS).sum(axis=1) - (near_LS != old_LS).sum(axis=1)
        mean_L = window.counts_TLE.sum(axis=(0, 2)) * SHARE_UNIT // self.ranks
        is_worth_it: NDArray[np.bool_] = (
            saved_TL.sum(axis=0) > mean_L // (1000 * old_LS.shape[1]) * self.move_cost_permille * more_L
        )
        return is_worth_it
