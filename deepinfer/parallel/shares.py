"""What a layout makes of a load: the share of each copy, the load of each rank, and busiest over mean.

Shares are whole numbers of 1 / SHARE_UNIT of a token: equal loads stay equal, and no sum depends on its order.
Legend: T steps, L layers, E experts, R ranks, S slots of all ranks, K slots of one rank.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout, copies_of

SHARE_UNIT: Final = 720_720
"""Divisible by every number of copies up to 16, so that those shares are exact; beyond, they round down."""
_MOST_SHARES: Final = 2**14
"""Shares worked on at once, which is what the nearest caches hold."""


def shares(loads: NDArray[np.int64], copies: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
    """Return what one copy carries, in units; a load is spread evenly over the copies of its expert."""
    return loads * SHARE_UNIT // copies


def busiest_loads(window: LoadWindow, layout_LS: Layout, ranks: int) -> NDArray[np.int64]:
    """Return the load of the busiest rank, in units, for each step and layer."""
    copies_LE = copies_of(layout_LS, window.experts)
    busiest = np.empty((window.steps, window.layers), dtype=np.int64)
    some = max(1, _MOST_SHARES // (window.steps * layout_LS.shape[1]))
    for begin in range(0, window.layers, some):  # a few layers at a time, so that a long window needs little memory
        layers = slice(begin, begin + some)
        shares_TLE = shares(window.counts_TLE[:, layers], copies_LE[layers])
        shares_TLS = shares_TLE[:, np.arange(shares_TLE.shape[1])[:, None], layout_LS[layers]]
        busiest[:, layers] = shares_TLS.reshape(*shares_TLE.shape[:2], ranks, -1).sum(axis=3).max(axis=2)
    return busiest


def rank_loads(window: LoadWindow, layout_LS: Layout, ranks: int) -> NDArray[np.float64]:
    """Return each rank's load in the whole window over the mean rank's, [layers, ranks]; 1 where a layer is idle."""
    share_LE = shares(window.totals(), copies_of(layout_LS, window.experts))
    load_LR = (
        np.take_along_axis(share_LE, layout_LS.astype(np.int64), axis=1).reshape(window.layers, ranks, -1).sum(axis=2)
    )
    total_L1 = load_LR.sum(axis=1)[:, None]
    loads: NDArray[np.float64] = np.where(total_L1 > 0, load_LR * ranks / np.maximum(total_L1, 1), 1.0)
    return loads


def busiest_over_mean(window: LoadWindow, layout_LS: Layout, ranks: int) -> NDArray[np.float64]:
    """Return moe_lb of each layer: the busiest rank's load over the mean rank's, each summed over the steps first.

    1 is perfect balance, and the number of ranks is the worst; a layer without load counts as 1.
    """
    busiest_L = busiest_loads(window, layout_LS, ranks).sum(axis=0)
    total_L = window.counts_TLE.sum(axis=(0, 2)) * SHARE_UNIT
    ratio: NDArray[np.float64] = np.where(total_L > 0, busiest_L * ranks / np.maximum(total_L, 1), 1.0)
    return ratio
