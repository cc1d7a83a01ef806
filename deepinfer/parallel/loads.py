"""How much each expert had to do: counts of valid tokens, step by step, and when they lead to a plan.

Legend: T steps of a window, L layers, E experts, N rows, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ArgumentError, InvariantError

MOST_STEPS = 1024
MOST_PAIRS_PER_STEP = 2**24
NO_EXPERT = -1


@dataclass(frozen=True, slots=True, eq=False)
class LoadWindow:
    """Counts of a whole group over some steps: integers, so that sums do not depend on an order.

    Attributes:
        counts_TLE: int64, pairs of a valid token and an expert that it chose.
    """

    counts_TLE: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Refuse what is no window, all problems at once."""
        counts = self.counts_TLE
        problems = []
        if counts.dtype != np.int64:
            problems.append(f"counts are {counts.dtype}; give int64 (a load that is no whole number is no count)")
        if counts.ndim != 3 or 0 in counts.shape:
            problems.append(f"counts have shape {counts.shape}; give [steps, layers, experts], none of them 0")
        if problems:
            raise ArgumentError("load window", problems)
        if counts.shape[0] > MOST_STEPS:
            problems.append(f"{counts.shape[0]} steps; {MOST_STEPS} is the most (sum neighbouring steps)")
        if counts.min() < 0:
            problems.append(f"the least count is {counts.min()}; counts start at 0")
        elif counts.max() > MOST_PAIRS_PER_STEP or counts.sum(axis=2).max() > MOST_PAIRS_PER_STEP:
            problems.append(f"a step counts more than {MOST_PAIRS_PER_STEP} pairs in one layer; scale the counts down")
        if problems:
            raise ArgumentError("load window", problems)

    @property
    def steps(self) -> int:
        """Steps of the window."""
        return int(self.counts_TLE.shape[0])

    @property
    def layers(self) -> int:
        """Layers that were counted."""
        return int(self.counts_TLE.shape[1])

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return int(self.counts_TLE.shape[2])

    def totals(self) -> NDArray[np.int64]:
        """Return the sums over all steps."""
        totals: NDArray[np.int64] = self.counts_TLE.sum(axis=0)
        return totals

    def of_layers(self, layers: NDArray[np.int64]) -> LoadWindow:
        """Return the counts of some layers only, in their order; of all, itself."""
        if layers.size == self.layers and (layers == np.arange(self.layers)).all():
            return self
        return LoadWindow(np.ascontiguousarray(self.counts_TLE[:, layers]))

    def folded(self, most_steps: int) -> LoadWindow:
        """Return sums of neighbouring steps, the fewest each that leave ``most_steps`` or less; the newest are whole.

        A policy learns no more from a thousand steps than from a hundred sums of ten, and takes ten times as long.
        """
        size = -(-self.steps // most_steps)
        if size == 1:
            return self
        short = -self.steps % size
        padded_TLE = np.concatenate([np.zeros((short, *self.counts_TLE.shape[1:]), np.int64), self.counts_TLE])
        return LoadWindow(padded_TLE.reshape(-1, size, self.layers, self.experts).sum(axis=1))

    def halves(self) -> tuple[LoadWindow, LoadWindow]:
        """Return the older steps, to plan from, and the newer ones, to judge by; a single step is both."""
        if self.steps == 1:
            return self, self
        newer = self.steps // 2
        return LoadWindow(self.counts_TLE[:-newer]), LoadWindow(self.counts_TLE[-newer:])


class LoadCounter:
    """Counts this rank's valid tokens; the sum over all ranks' windows is what a plan is made from.

    Padding, placeholder and warm-up rows are not valid and count nothing. The rows of drafts that are verified are
    valid, whether or not they are accepted: the experts computed them.
    """

    def __init__(self, layers: int, experts: int, window_steps: int) -> None:
        """Start with an empty window that keeps the last ``window_steps`` steps."""
        sizes = {"layers": layers, "experts": experts, "window_steps": window_steps}
        problems = [f"{name} must be at least 1, got {value}" for name, value in sizes.items() if value < 1]
        if window_steps > MOST_STEPS:
            problems.append(f"window_steps is {window_steps}; {MOST_STEPS} is the most")
        if problems:
            raise ArgumentError("load counter", problems)
        # One row more than the window: the step that is being counted.
        self._ring_TLE = np.zeros((window_steps + 1, layers, experts), dtype=np.int64)
        self._steps = 0

    @property
    def steps(self) -> int:
        """Steps that ended since the counter was armed."""
        return self._steps

    def add(self, layer: int, experts_Nk: NDArray[np.int64], valid_N: NDArray[np.bool_]) -> None:
        """Count the choices of one layer in the current step; may be called several times a step.

        A row that is not valid counts nothing, whatever its experts; NO_EXPERT counts nothing anywhere.
        """
        chosen = experts_Nk[valid_N].ravel()
        chosen = chosen[chosen != NO_EXPERT]
        experts = self._ring_TLE.shape[2]
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < experts):
            raise InvariantError(f"layer {layer} was routed to experts {chosen.min()} to {chosen.max()} of {experts}")
        self._ring_TLE[self._place(), layer] += np.bincount(chosen, minlength=experts)

    def add_counts(self, counts_LE: NDArray[np.int64]) -> None:
        """Add what was counted elsewhere in the current step, on a device, by the rules of :meth:`add`."""
        self._ring_TLE[self._place()] += counts_LE

    def end_step(self) -> None:
        """Close the current step; a rank that was idle in it calls this too, so that all windows stay aligned."""
        self._steps += 1
        self._ring_TLE[self._place()] = 0

    def window(self) -> LoadWindow:
        """Return the steps that ended, the oldest first, at most a window of them; raises if there is none."""
        if not self._steps:
            raise InvariantError("no step ended since the load counter was armed")
        size = self._ring_TLE.shape[0]
        kept = min(self._steps, size - 1)
        places = [(self._steps - age) % size for age in range(kept, 0, -1)]
        return LoadWindow(self._ring_TLE[places])

    def rearm(self) -> None:
        """Forget everything, after a plan was made, so that the next one knows the new layout's load alone."""
        self._ring_TLE[:] = 0
        self._steps = 0

    def _place(self) -> int:
        return self._steps % self._ring_TLE.shape[0]


class ReplanClock:
    """Says after which steps a plan is due: first at a quarter of the interval, then after every interval.

    It counts steps of the group, placeholder steps included, and so says the same on every rank.
    """

    def __init__(self, interval_steps: int) -> None:
        """Start before the first step."""
        if interval_steps < 1:
            raise ArgumentError("re-plan interval", [f"interval_steps must be at least 1, got {interval_steps}"])
        self._interval = interval_steps
        self._until_due = max(1, interval_steps // 4)

    def end_step(self) -> bool:
        """Count one step; return whether a plan is due now."""
        self._until_due -= 1
        if self._until_due:
            return False
        self._until_due = self._interval
        return True
