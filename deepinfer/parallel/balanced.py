"""The default policy: a few moves where they help, a new layout where those do not, and nothing where chance rules.

Legend: T steps, L layers, E experts, R ranks, S slots of all ranks, K slots of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ArgumentError
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.noise import ONE, cautious, dispersions, relative_scatter
from deepinfer.parallel.placement import Layout
from deepinfer.parallel.policy import check_inputs
from deepinfer.parallel.searching import Search
from deepinfer.parallel.shares import SHARE_UNIT, busiest_loads

_SINGLE_STEP_CAUTION_PERCENT = 500
_FEW_PAIRS = 4  # paired gains from which their own scatter is worth knowing


@dataclass(frozen=True, slots=True)
class BalancedPolicy:
    """Plans from the older half of a window and moves a layer only if the newer half shows that it pays.

    A single step has no halves: it is planned for exactly, and must show five standard deviations of gain.

    Attributes:
        move_cost_permille: gain in busiest over mean, in thousandths, that moving all slots of a layer must earn;
            fewer slots must earn less in proportion.
        least_gain_permille: gain below which nothing moves, however few slots it takes.
        caution_percent: standard deviations, in hundredths, by which a gain must exceed what chance explains; 0
            believes every step.
    """

    name: str = "balanced"
    move_cost_permille: int = 20
    least_gain_permille: int = 2
    caution_percent: int = 180

    def __post_init__(self) -> None:
        """Refuse negative numbers, all at once."""
        fields = ("move_cost_permille", "least_gain_permille", "caution_percent")
        problems = [f"{name} is {getattr(self, name)}; 0 is the least" for name in fields if getattr(self, name) < 0]
        if problems:
            raise ArgumentError("balanced policy", problems)

    def plan(self, window: LoadWindow, layout_LS: Layout, ranks: int) -> Layout:
        """Return the layout with those layers changed for which the window shows a gain above its cost."""
        check_inputs(window, layout_LS, ranks)
        planned_LS = layout_LS.copy()
        layers = np.flatnonzero(window.totals().any(axis=1))
        if ranks == 1 or not layers.size:
            return planned_LS
        search = Search(ranks, self.move_cost_permille)
        older, newer = window.of_layers(layers).halves()
        kept_LS = layout_LS[layers]
        candidate_LS = search.best(older, kept_LS)
        pays = self._pays(newer, kept_LS, candidate_LS, ranks)
        layers, kept_LS, candidate_LS = layers[pays], kept_LS[pays], candidate_LS[pays]
        if not layers.size:
            return planned_LS
        if window.steps > 1:
            # That a change pays is settled; what it is may be chosen with all that is known. A single step is known.
            whole = window.of_layers(layers)
            candidate_LS = search.best(whole, kept_LS)
            candidate, kept = (busiest_loads(whole, each_LS, ranks).sum(axis=0) for each_LS in (candidate_LS, kept_LS))
            is_better = candidate < kept
            layers, candidate_LS = layers[is_better], candidate_LS[is_better]
        planned_LS[layers] = candidate_LS
        return planned_LS

    def _pays(self, window: LoadWindow, kept_LS: Layout, candidate_LS: Layout, ranks: int) -> NDArray[np.int64]:
        """Return the layers whose candidate gains more on steps it does not know than it costs, chance deducted."""
        steps, slots = window.steps, kept_LS.shape[1]
        gains = (busiest_loads(window, kept_LS, ranks) - busiest_loads(window, candidate_LS, ranks)).T.tolist()
        moved = (kept_LS != candidate_LS).sum(axis=1).tolist()
        tokens = window.counts_TLE.sum(axis=(0, 2)).tolist()
        caution = self.caution_percent
        if steps == 1 and caution:
            caution = max(caution, _SINGLE_STEP_CAUTION_PERCENT)
        paying = []
        for layer, (gain, dispersion) in enumerate(zip(gains, dispersions(window).tolist(), strict=True)):
            mean = tokens[layer] * SHARE_UNIT // ranks
            cost = mean * (self.least_gain_permille * slots + self.move_cost_permille * moved[layer]) // (1000 * slots)
            scatter = mean * relative_scatter(cautious(dispersion, steps=steps), tokens[layer], ranks) // ONE
            total = sum(gain)
            if steps >= _FEW_PAIRS:
                spread = sum((steps * each - total) ** 2 for each in gain)
                scatter = max(scatter, isqrt(spread // (steps * (steps - 1))))
            if moved[layer] and total > cost + scatter * caution // 100:
                paying.append(layer)
        return np.array(paying, dtype=np.int64)
