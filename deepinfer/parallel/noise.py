"""How much of a window is chance: what no layout can repair, and what a plan should not chase.

Whole numbers only. Counts of independent choices scatter like Poisson numbers (dispersion 1); equal steps do not
scatter at all (dispersion 0); bursts of traffic scatter more.
Legend: T steps, L layers, E experts, R ranks.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.parallel.loads import LoadWindow

ONE: Final = 2**16
"""The value of 1 in the fixed-point numbers of this file."""


def dispersions(window: LoadWindow) -> NDArray[np.int64]:
    """Return for each layer the scatter of counts around their share of a step, over the Poisson scatter.

    A single step tells nothing about scatter, and gives 0; so does a layer without load.
    """
    if window.steps == 1:
        return np.zeros(window.layers, dtype=np.int64)
    return np.array([_dispersion(window.counts_TLE[:, layer]) for layer in range(window.layers)], dtype=np.int64)


def _dispersion(counts_TE: NDArray[np.int64]) -> int:
    step_T1 = counts_TE.sum(axis=1)[:, None]
    total_E = counts_TE.sum(axis=0)
    total = max(int(total_E.sum()), 1)
    # Both factors are bounded by the window (2^34 and 2^24), so that twice their product fits.
    expected_TE = (2 * total_E * step_T1 + total) // (2 * total)
    squares_E = ((counts_TE - expected_TE) ** 2).sum(axis=0)
    # Floats only element by element, where every platform rounds alike; sums are of whole numbers.
    scatter_E = np.rint(squares_E / np.maximum(total_E, 1) * (len(counts_TE) * ONE)).astype(np.int64)
    freedom = max(int(np.count_nonzero(total_E)) - 1, 1) * (len(counts_TE) - 1)
    return int(scatter_E.sum()) // freedom


def cautious(dispersion: int, *, steps: int) -> int:
    """Return the dispersion that a decision reckons with: Poisson at most, and Poisson where none can be seen."""
    return ONE if steps == 1 else min(dispersion, ONE)


def relative_scatter(dispersion: int, tokens: int, ranks: int) -> int:
    """Return the standard deviation over the mean, in 1 / ONE, of the load of one of ``ranks`` that share tokens."""
    return isqrt(ONE * dispersion * ranks // max(tokens, 1))


def lone_copy_weight(dispersion: int, tokens_per_step: int, ranks: int) -> int:
    """Return by how much, in 1 / ONE, an expert with one copy counts heavier than its load.

    The busiest of many ranks is the one that chance favours, and chance is larger where an expert's rows are not
    spread over copies: variance is load over copies. To first order the expected maximum over ranks grows with half
    the variance over the standard deviation, times what the largest of so many normal numbers is expected to be,
    whose square is close to log2(ranks) - 1.
    """
    squared = max((ranks - 1).bit_length() - 1, 0)
    weight = isqrt(ONE * squared * dispersion * ranks // (4 * max(tokens_per_step, 1)))
    return min(weight, ONE)
