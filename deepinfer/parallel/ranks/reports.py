"""What balancing has done: equal on all ranks of an expert group, but for the seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """What has become of the experts of one expert group so far.

    Attributes:
        steps: steps of the group that were counted.
        plans: how often the policy was asked.
        changes: how often it moved something.
        moved_experts: slots that were filled with another expert, all layers together.
        moved_bytes: bytes of weights and scales that went from one rank to another for it.
        seconds: what agreeing, planning and moving took on this rank.
        busiest_over_mean: of the newest window, mean of all layers, under the layout that served it; 1 is perfect, and
            what a window without load counts as. None before the first plan.
        planned_busiest_over_mean: the same under the layout that was chosen; equal where nothing has moved.
    """

    steps: int = 0
    plans: int = 0
    changes: int = 0
    moved_experts: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0
    busiest_over_mean: float | None = None
    planned_busiest_over_mean: float | None = None
