"""How many drafts the next round makes, so that drafts which do not pay are not even drafted.

A round is paid for whatever is verified of it. What it costs is learnt from steps: at first every round makes all its
drafts, then a few make none, and as many as fill up 2, 4, 8 ... rows of a request, where costs have their steps; what
lies between is interpolated. Steps with another number of requests go by what is known of the nearest one, until they
have been tried themselves, now and then. What a draft is worth is what the draft model says, put right by what became
of the drafts so far.

Shapes: R requests, n drafts a request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.draft_tally import DraftTally
from deepinfer.sampling.verify_budget import CostCurve, rank_rounds

SETTLING_STEPS = 10
"""So many steps make full rounds before anything is tried."""

LEAST_TIMES = 3
MOST_TRIES = 8
"""A length whose time does not come in so many tries is not waited for: the device does not tell times."""

NEWEST_TIMES = 9
STEPS_PER_PROBE = 32
"""One step in so many makes a round of another length than the best, so that no estimate grows old."""

STEPS_PER_TRY = 4
"""One step in so many is a try, where another size says what to choose meanwhile."""

_LEARNING_SHARE = 0.1


@dataclass(slots=True)
class _Size:
    """What is known of steps with about so many requests."""

    steps: int = 0
    tries: dict[int, int] = field(default_factory=dict)
    times: dict[int, deque[float]] = field(default_factory=dict)


class RoundLengths:
    """Chooses the length of each round.

    Attributes:
        drafts: n, the most.
        is_trial: whether the newest choice was made to learn what it costs, and not because it is the best: then all
            its drafts must be verified, or nobody learns what their rows cost.
    """

    def __init__(self, drafts: int, tally: DraftTally) -> None:
        """Begin with nothing known; the tally counts what becomes of drafts."""
        self.drafts = drafts
        self.is_trial = False
        self._tally = tally
        self._chances_n = np.ones(drafts)
        self._seen_n = np.zeros(drafts)
        self._sizes: dict[int, _Size] = {}
        # What is tried: all, none, and what makes a power of two together with the row of the newest token.
        powers = ((1 << exponent) - 1 for exponent in range(1, drafts.bit_length()))
        self._tried: tuple[int, ...] = tuple(dict.fromkeys((drafts, 0, *powers)))

    @property
    def chances_n(self) -> NDArray[np.float64]:
        """Cumulative chances of acceptance of the drafts of a round that nobody has made yet."""
        return np.minimum.accumulate((self._chances_n * self._tally.corrections_n).clip(0.0, 1.0))

    def observe(self, chances_Rn: NDArray[np.floating]) -> None:
        """Learn from the chances of drafts that were made; what was not made has 0."""
        for place in np.flatnonzero((chances_Rn > 0).any(0)).tolist():
            made_R = chances_Rn[:, place]
            mean = float(made_R[made_R > 0].mean())
            self._seen_n[place] += 1
            share = max(_LEARNING_SHARE, 1.0 / self._seen_n[place])  # at first the plain mean
            self._chances_n[place] += share * (mean - self._chances_n[place])

    def note(self, requests: int, drafts: int, after_s: float) -> None:
        """Learn what judging and a round of so many drafts take, at the pace at which the cost curve is kept."""
        times = self._size(requests).times
        times.setdefault(drafts, deque(maxlen=NEWEST_TIMES)).append(after_s)

    def after(self, requests: int) -> list[float] | None:
        """Return what judging takes together with a round of 0 to n drafts, by the nearest size that tells it."""
        wanted = _size_class(requests)
        for nearest in sorted(self._sizes, key=lambda each: (abs(each - wanted), each)):
            if (after_s := self._after(self._sizes[nearest])) is not None:
                return after_s
        return None

    def choose(self, requests: int, curve: CostCurve) -> int:
        """Return how many drafts the round of a step with so many requests makes."""
        if not self.drafts:
            return 0
        size = self._size(requests)
        size.steps += 1
        after_s = self.after(requests)
        trial: int | None
        if after_s is None:
            # A full round between two tries tells the pace of the machine, which other sizes do not know yet.
            trial = None if size.steps <= SETTLING_STEPS or size.steps % 2 == 0 else self._next_try(size)
            self.is_trial = trial is not None or SETTLING_STEPS - LEAST_TIMES < size.steps <= SETTLING_STEPS
            return self.drafts if trial is None else trial
        best, second, *_ = rank_rounds(self.chances_n, requests, curve, after_s)
        trial = self._probe(size, second) if self._after(size) is not None else self._try(size)
        self.is_trial = trial is not None
        return best if trial is None else trial

    def _probe(self, size: _Size, second: int) -> int | None:
        """Return a length to be looked at again; None in most steps."""
        probe, rest = divmod(size.steps, STEPS_PER_PROBE)
        if rest:
            return None
        if probe % 2:
            return second  # its estimate decides whether the best is the best
        # What was chosen once is probed too: a time of long ago would hide what lies beyond it.
        probed = (*self._tried, *sorted(set(size.times).difference(self._tried)))
        return probed[probe // 2 % len(probed)]

    def _try(self, size: _Size) -> int | None:
        return None if size.steps % STEPS_PER_TRY else self._next_try(size)

    def _after(self, size: _Size) -> list[float] | None:
        known = {drafts: median(each) for drafts, each in size.times.items() if len(each) >= LEAST_TIMES}
        if any(drafts not in known for drafts in self._tried):
            return None
        # A round of none has no stages to pass: it says nothing about the others.
        places = sorted(drafts for drafts in known if drafts)
        between = np.interp(range(1, self.drafts + 1), places, [known[drafts] for drafts in places])
        rising: list[float] = np.maximum.accumulate([known[0], *between]).tolist()
        return rising

    def _next_try(self, size: _Size) -> int | None:
        for drafts in self._tried:
            if len(size.times.get(drafts, ())) < LEAST_TIMES and size.tries.get(drafts, 0) < MOST_TRIES:
                size.tries[drafts] = size.tries.get(drafts, 0) + 1
                return drafts
        return None

    def _size(self, requests: int) -> _Size:
        return self._sizes.setdefault(_size_class(requests), _Size())


def _size_class(requests: int) -> int:
    return (requests - 1).bit_length()
