"""Time that passes only when somebody says so."""

from __future__ import annotations

STEP_S = 0.01
"""What an ordinary step costs."""

SLOW_STEP_S = 1.0
"""What a slow step costs."""


class VirtualClock:
    """Seconds since the beginning of the simulated life."""

    def __init__(self) -> None:
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        """The time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds
