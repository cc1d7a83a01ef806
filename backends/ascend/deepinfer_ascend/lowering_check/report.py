"""What the lowering check found, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

How = Literal["lowered", "executed on x86"]
Status = Literal["ok", "failed"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel, lowered for a chip or executed from its lowered form.

    Attributes:
        op: an op of the contract that the kernel serves.
        soc: the chip that it was lowered for; "any" for what was executed.
        how: what was tried.
        status: whether it went well.
        kernel: name of the kernel.
        configuration: what distinguishes this form of it, or the case that was executed.
        seconds: how long the tools took.
        problem: their reason; empty when it went well.
        taken: the driver may take this kernel; it has an operator for what the others compute.
    """

    op: str
    soc: str
    how: How
    status: Status
    kernel: str
    configuration: str
    seconds: float
    problem: str = ""
    taken: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """All entries and what they stand on."""

    versions: Mapping[str, str]
    entries: tuple[Entry, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Every problem of a kernel that the driver may take, once, one line each."""
        return self._problems(taken=True)

    @property
    def others(self) -> tuple[str, ...]:
        """The problems of kernels that the driver does not take."""
        return self._problems(taken=False)

    def _problems(self, *, taken: bool) -> tuple[str, ...]:
        failed = [entry for entry in self.entries if entry.status == "failed" and entry.taken is taken]
        return tuple(
            dict.fromkeys(
                f"{entry.kernel} ({entry.configuration}), {entry.how}, {entry.soc}: {entry.problem}" for entry in failed
            )
        )

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"versions": dict(self.versions), "entries": [asdict(entry) for entry in self.entries]}
        path.write_text(json.dumps(document, indent=1) + "\n")


def read_report(path: Path) -> Report:
    """Return a report that was written."""
    document = json.loads(path.read_text())
    return Report(document["versions"], tuple(Entry(**entry) for entry in document["entries"]))
