"""What a case can come to, and what a check finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Level(IntEnum):
    """The ladder. Each level stands on the ones below it."""

    L0 = 0
    L1 = 1
    L2 = 2
    L3 = 3
    L4 = 4
    L5 = 5
    L6 = 6
    L7 = 7


LEVEL_TITLES = {
    Level.L0: "device, memory, allocation, claims",
    Level.L1: "op numerics against float64",
    Level.L2: "bit-exact invariance",
    Level.L3: "collectives",
    Level.L4: "streams and recorded graphs",
    Level.L5: "the small model end to end",
    Level.L6: "life cycle: abort, preemption, fork, leaks",
    Level.L7: "soak",
}


class Outcome(StrEnum):
    """What became of one case."""

    PASS = "pass"  # noqa: S105 - an outcome, not a password
    FAIL = "fail"
    """A claim did not hold: a wrong value, or a claimed call that was refused, or an unclaimed one that was served."""
    REFUSED = "refused"
    """The call lies outside the claims and the driver refused it, as it must."""
    WAIVED = "waived"
    """It failed, and a waiver that has not expired covers it."""
    NOT_CLAIMED = "not claimed"
    ERROR = "error"
    """The driver raised something other than a refusal, out of memory included."""
    CRASH = "crash"
    TIMEOUT = "timeout"

    @property
    def is_good(self) -> bool:
        """True where nothing that was claimed has been shown wrong."""
        return self in (Outcome.PASS, Outcome.REFUSED, Outcome.WAIVED, Outcome.NOT_CLAIMED)


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison of a check.

    Attributes:
        metric: what was measured: "max error / bound", "differing elements", "bytes that differ".
        value: what came out.
        bound: what is allowed; the finding holds if ``value <= bound`` (a NaN never does).
        detail: where and what, in words.
        reference_error: the reference's own value of the same metric, computed as the driver computes; None if the
            metric has none.
        part: the result or argument that was compared.
        element: flat index of the worst element in that part; None where there is none.
        data: plain values that a reader may want, such as emitted tokens; they go into the report as they are.
    """

    metric: str
    value: float
    bound: float
    detail: str = ""
    reference_error: float | None = None
    part: str = ""
    element: int | None = None
    data: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """True if the value is within the bound."""
        return self.value <= self.bound

    @property
    def share(self) -> float:
        """How much of the bound is used; infinite where nothing is allowed and something was found."""
        if self.bound > 0:
            return self.value / self.bound
        return 0.0 if self.value == 0 else float("inf")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One line of the report.

    Attributes:
        id: identifier of the case; ``replay`` takes it.
        op: "group.op", or "" for what concerns the whole driver.
        level: of the check.
        check: name of the check.
        dtype: activation dtype.
        numerics: numerics mode.
        kv_cache_dtype: cache format.
        how: "device", "interpreted", "emulated", as the op's provider says.
        outcome: what became of it.
        metric, value, bound, reference_error: the worst finding.
        seed: of the run.
        input_sha256: digest of the inputs; "" where a case has none.
        seconds: time of the whole case.
        detail: the findings that did not hold, or the error, in words.
        data: what the check wanted to be kept, such as emitted tokens.
    """

    id: str
    op: str
    level: Level
    check: str
    dtype: str
    numerics: str
    kv_cache_dtype: str
    how: str
    outcome: Outcome
    metric: str
    value: float | None
    bound: float | None
    reference_error: float | None
    seed: int
    input_sha256: str
    seconds: float
    detail: str
    data: Mapping[str, Sequence[int]] = field(default_factory=dict)
