"""What decode steps cost: a curve measured at start, corrected by what steps have taken since.

The curve is measured with made-up requests, short contexts and a machine that does nothing else. Real steps differ:
they tell, by their rows, how much (:class:`StepCosts`). A machine also is quick in one minute and slow in the next, for
steps of every size alike, so that costs are kept as they would be at one pace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np

from deepinfer.sampling.verify_budget import CostCurve

Clock = Callable[[], float]
"""Seconds from some fixed moment."""

TIMED_RUNS = 5
"""Runs of each size that are timed, after one that is not; the best and the worst are dropped."""

LEAST_STEPS = 10
"""So many steps must have been seen before they correct anything."""

LEAST_SAMPLER_TIMES = 5
NEWEST_SAMPLER_TIMES = 9
NEWEST_TIMES = 9
"""Newest steps of a size that say what it costs; one that has had as many is settled."""

LEAST_TIMES = 3
"""So many steps of one size say what that size costs, whatever the others suggest."""

STEPS_PER_CORRECTION = 5
"""One step in so many corrects the curve, which takes the host longer than all else that is done here."""

STEPS_TO_PACE = 7
"""So many newest steps tell the machine's pace."""

_LEAST_STEP_S = 1e-9
_MOST_STEP_S = 1e9
_LEAST_SHARE = 0.1
"""No correction makes a step cheaper than this share of what was measured."""


def measure_curve(
    sizes: Sequence[int],
    prepare: Callable[[int], Callable[[], object]],
    clock: Clock,
    *,
    is_padded: bool,
    tick: Callable[[], object] = lambda: None,
) -> CostCurve:
    """Time steps of each size.

    Args:
        sizes: rows, ascending.
        prepare: returns, for a size, what runs one step and waits for its end.
        clock: seconds.
        is_padded: steps of other sizes will be padded to one of these.
        tick: called once for each size.
    """
    seconds = []
    for size in sizes:
        run = prepare(size)
        run()
        times = []
        for _ in range(TIMED_RUNS):
            before = clock()
            run()
            took_s = clock() - before
            times.append(took_s if is_time(took_s) else 0.0)
        # A clock may be too coarse to see a step at all.
        seconds.append(max(fmean(sorted(times)[1:-1]), _LEAST_STEP_S))
        tick()
    return CostCurve(tuple(sizes), tuple(seconds), is_padded)


def is_time(seconds: float) -> bool:
    """Say whether a step can have taken so long: a clock may run backwards, jump, or give no number."""
    return 0.0 <= seconds <= _MOST_STEP_S


class StepCosts:
    """The curve as it is believed to be now.

    Attributes:
        measured: the curve of the start.
        pace: how much slower the machine is now than it was when the costs were learnt.
    """

    def __init__(self, measured: CostCurve) -> None:
        self.measured = measured
        self.pace = 1.0
        self._steps = 0
        # The newest steps of settled sizes: the size, and what the step took over what steps of this size take.
        self._newest: deque[tuple[int, float]] = deque(maxlen=STEPS_TO_PACE)
        # What steps took over what was measured, at the pace of the start, by the nearest measured size: a size that is
        # seldom run is not forgotten over one that is run all the time.
        self._ratios: dict[int, deque[float]] = {}
        self._sampler_times: deque[float] = deque(maxlen=NEWEST_SAMPLER_TIMES)
        self._curve: CostCurve | None = measured

    def note(self, rows: int, step_s: float, sampler_s: float) -> None:
        """Remember what a step of so many rows took: the pass with its logits, and everything after them."""
        nearest = min(self.measured.sizes, key=lambda size: (max(size, rows) / min(size, rows), size))
        ratio = step_s / self.measured.of(rows)
        known = self._ratios.setdefault(nearest, deque(maxlen=NEWEST_TIMES))
        is_settled = len(known) == NEWEST_TIMES and median(known) > 0
        if is_settled:
            self._newest.append((nearest, ratio / median(known)))
            if len(self._newest) >= LEAST_TIMES and (pace := median(each for _, each in self._newest)) > 0:
                self.pace = pace
        # Steps of a settled size are slow or quick with the machine. Where nothing else is run they tell the pace, and
        # nothing else: a size that followed the machine would drift away from those that are seldom run.
        if not is_settled or any(size != nearest for size, _ in self._newest):
            known.append(ratio / self.pace)
        self._sampler_times.append(sampler_s / self.pace)
        self._steps += 1
        if self._steps % STEPS_PER_CORRECTION == 0:
            self._curve = None

    @property
    def sampler_s(self) -> float:
        """The median of the newest times of judging and drafting, at the start's pace; 0 until there are enough."""
        return median(self._sampler_times) if len(self._sampler_times) >= LEAST_SAMPLER_TIMES else 0.0

    @property
    def curve(self) -> CostCurve:
        """The measured curve as steps since have corrected it, at the pace of the start; costs never fall with rows.

        Steps of several sizes correct its slope and its height; a size that was run a few times, itself too.
        """
        if self._curve is None:
            self._curve = self.measured if self._steps < LEAST_STEPS else self._corrected()
        return self._curve

    def _corrected(self) -> CostCurve:
        seen = np.array(sorted(self._ratios))
        # A step that was interrupted says nothing about its rows: medians do not listen to it.
        beyond = np.array([self.measured.of(size) * (median(self._ratios[size]) - 1) for size in seen.tolist()])
        counts = np.array([len(self._ratios[size]) for size in seen.tolist()])
        sizes, before = np.array(self.measured.sizes), np.array(self.measured.seconds)
        if len(seen) == 1:
            # One size says how fast the machine is, nothing about the slope.
            after = before * (1 + beyond[0] / self.measured.of(int(seen[0])))
        else:
            slope, height = np.polyfit(seen, beyond, 1, w=np.sqrt(counts))
            after = before + height + slope * sizes
            is_sure = counts >= LEAST_TIMES
            if is_sure.any():
                after += np.interp(sizes, seen[is_sure], (beyond - height - slope * seen)[is_sure])
        after = np.maximum.accumulate(np.maximum(after, before * _LEAST_SHARE))
        return CostCurve(self.measured.sizes, tuple(after.tolist()), self.measured.is_padded)
