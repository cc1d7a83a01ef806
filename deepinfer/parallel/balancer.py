"""One rank's balancer: counts, comes due, proposes a change from the whole group's counts, and switches in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer.errors import ArgumentError, InvariantError
from deepinfer.parallel.exchange import ExchangePlan, ExpertPart, plan_exchange
from deepinfer.parallel.loads import LoadCounter, LoadWindow, ReplanClock
from deepinfer.parallel.placement import PlacementShape, ReplicaMaps
from deepinfer.parallel.policy import BalancePolicy


@dataclass(frozen=True, slots=True)
class Change:
    """A change of layout that every rank proposes alike.

    Attributes:
        before: the maps that it starts from.
        after: the maps to switch to, in the step after all moves are done.
        exchange: what moves, weights and scales together.
    """

    before: ReplicaMaps
    after: ReplicaMaps
    exchange: ExchangePlan


def group_window(windows: Sequence[LoadWindow]) -> LoadWindow:
    """Return the sum of all ranks' windows, which must be of the same steps."""
    shapes = sorted({window.counts_TLE.shape for window in windows})
    if len(shapes) != 1:
        raise ArgumentError("load windows of a group", [f"shapes {shapes}; give one window a rank, all of one shape"])
    return LoadWindow(np.sum([window.counts_TLE for window in windows], axis=0))


class ExpertBalancer:
    """Holds the live maps; weights, scales and maps change together or not at all.

    In every step each rank counts with ``counter.add`` and calls ``end_step``, idle ranks too. When that says so, all
    ranks add up their ``counter.window()``, call ``propose`` with the sum, carry out the exchange, and call ``switch``.
    """

    def __init__(
        self,
        shape: PlacementShape,
        policy: BalancePolicy,
        parts: tuple[ExpertPart, ...],
        *,
        interval_steps: int,
        window_steps: int,
    ) -> None:
        """Start with the start-up layout; ``parts`` are all the tensors of an expert, packed weights and scales."""
        self._shape, self._policy, self._parts = shape, policy, parts
        self._clock = ReplanClock(interval_steps)
        self.counter = LoadCounter(shape.layers, shape.experts, window_steps)
        self._maps = ReplicaMaps.of(shape.start_up_layout(), shape)

    @property
    def maps(self) -> ReplicaMaps:
        """The maps that this step routes by; a reload of weights fills the slots by their layout."""
        return self._maps

    def end_step(self) -> bool:
        """Close a step of the group; return whether a plan is due, which is the same on every rank."""
        self.counter.end_step()
        return self._clock.end_step()

    def propose(self, window: LoadWindow) -> Change | None:
        """Return the change that the group's window asks for; None if nothing shall move. Counting starts anew."""
        self.counter.rearm()
        before = self._maps
        layout_LS = self._policy.plan(window, before.layout_LS, self._shape.ranks)
        if (layout_LS == before.layout_LS).all():
            return None
        exchange = plan_exchange(before.layout_LS, layout_LS, self._shape.ranks, self._parts)
        return Change(before, ReplicaMaps.of(layout_LS, self._shape), exchange)

    def switch(self, change: Change) -> None:
        """Route by the new maps from now on; all moves of the change are done. Counting starts anew."""
        if change.before is not self._maps:
            raise InvariantError(
                "the change starts from another layout than the live one: it was proposed before another"
            )
        self._maps = change.after
        self.counter.rearm()
