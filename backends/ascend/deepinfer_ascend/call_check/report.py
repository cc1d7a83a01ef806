"""What the call check found, as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

How = Literal["meta", "emulated"]
Status = Literal["ok", "failed"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One call that was tried.

    Attributes:
        op: the op of the contract.
        soc: the chip that the call is made for.
        how: on meta tensors, or on an emulated device.
        status: whether it went as expected.
        subject: "operator" for a call site, "op" for a whole op of the driver.
        operators: torch-npu's operators that were called, in order.
        shapes: "production" or "small".
        problem: what went wrong; empty when nothing did.
    """

    op: str
    soc: str
    how: How
    status: Status
    subject: str
    operators: tuple[str, ...]
    shapes: str
    problem: str = ""

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "op": self.op,
            "soc": self.soc,
            "how": self.how,
            "status": self.status,
            "subject": self.subject,
            "operators": list(self.operators),
            "shapes": self.shapes,
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All entries, and what the check itself misses.

    Attributes:
        versions: name and version of what the check stood on.
        entries: the calls.
        problems: faults that belong to no call, such as a call site that nothing tried.
    """

    versions: tuple[tuple[str, str], ...]
    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Every problem, one line each."""
        failed = [
            f"{entry.op} on {entry.soc}, {entry.how}, {entry.shapes} {entry.subject}: {entry.problem}"
            for entry in self.entries
            if entry.status == "failed"
        ]
        return (*self.problems, *failed)

    def table(self) -> str:
        """Return a Markdown table: for each op and chip, how its calls were checked."""
        chips = list(dict.fromkeys(entry.soc for entry in self.entries))
        lines = [f"| op | {' | '.join(chips)} |", "| --- |" + " --- |" * len(chips)]
        for op in sorted({entry.op for entry in self.entries}):
            cells = []
            for chip in chips:
                found = [entry for entry in self.entries if (entry.op, entry.soc) == (op, chip)]
                hows = ", ".join(dict.fromkeys(entry.how for entry in found))
                cells.append("**failed**" if any(entry.status == "failed" for entry in found) else hows or "not called")
            lines.append(f"| `{op}` | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        document = {
            "versions": dict(self.versions),
            "entries": [entry.as_json() for entry in self.entries],
            "problems": list(self.problems),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


def read_entries(path: Path) -> tuple[Entry, ...]:
    """Return the entries of a report that another process wrote."""
    return tuple(
        Entry(**{**entry, "operators": tuple(entry["operators"])}) for entry in json.loads(path.read_text())["entries"]
    )


def merged(versions: Sequence[tuple[str, str]], entries: Sequence[Entry], problems: Sequence[str]) -> Report:
    """Return one report."""
    return Report(tuple(versions), tuple(entries), tuple(problems))
