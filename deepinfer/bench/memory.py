"""Resident memory of this process, and its peak since a moment of one's choice where the system allows that."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The largest resident size that was seen.

    Attributes:
        peak_resident_bytes: the peak.
        since: "mark" where it counts from :meth:`PeakMark.set`, "process start" where the system cannot forget.
    """

    peak_resident_bytes: int
    since: str


@dataclass(frozen=True, slots=True)
class PeakMark:
    """A moment from which the peak counts."""

    was_reset: bool

    @classmethod
    def set(cls) -> PeakMark:
        """Let the system forget earlier peaks, if it can."""
        try:
            _RESET.write_text(_RESET_PEAK)
        except OSError:  # another system than Linux, or a container that may not
            return cls(was_reset=False)
        return cls(was_reset=True)

    def read(self) -> PeakMemory:
        """Return the peak since the mark."""
        if self.was_reset:
            return PeakMemory(status_bytes(_STATUS.read_text(), "VmHWM"), "mark")
        unit = 1 if sys.platform == "darwin" else 1024
        return PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process start")


def status_bytes(status: str, name: str) -> int:
    """Return a size of /proc/self/status, whose lines read ``NAME:   123 kB``."""
    (words,) = (line.split() for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(words[1]) * 1024
