"""What a balancing policy is, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from deepinfer.errors import ArgumentError
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout


class BalancePolicy(Protocol):
    """Chooses the next layout from counts; equal inputs give equal bytes on every rank and platform."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        ...

    def plan(self, window: LoadWindow, layout_LS: Layout, ranks: int) -> Layout:
        """Return the next layout; layers that shall not change, and those without load, keep theirs."""
        ...


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """Never moves anything: what every other policy has to beat."""

    name: str = "keep"

    def plan(self, window: LoadWindow, layout_LS: Layout, ranks: int) -> Layout:
        """Return the layout as it is."""
        check_inputs(window, layout_LS, ranks)
        return layout_LS.copy()


def check_inputs(window: LoadWindow, layout_LS: Layout, ranks: int) -> None:
    """Raise ArgumentError, naming everything that is wrong, unless the three belong together."""
    problems = []
    if layout_LS.ndim != 2 or layout_LS.dtype != np.int32:
        raise ArgumentError("plan", [f"the layout is {layout_LS.dtype} {layout_LS.shape}; give int32 [layers, slots]"])
    layers, slots = layout_LS.shape
    if layers != window.layers:
        problems.append(f"the layout has {layers} layers, the load window {window.layers}")
    if ranks < 1 or slots % max(ranks, 1):
        problems.append(f"{slots} slots do not spread evenly over {ranks} ranks")
    if slots < window.experts:
        problems.append(f"{slots} slots cannot hold {window.experts} experts")
    elif any(len(set(row)) != window.experts for row in layout_LS.tolist()) or not (
        layout_LS.min() >= 0 and layout_LS.max() < window.experts
    ):
        problems.append(f"the layout does not hold each of the {window.experts} experts, and these alone")
    if problems:
        raise ArgumentError("plan", problems)
