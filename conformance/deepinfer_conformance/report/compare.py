"""Two reports side by side: levels, outcomes that differ, the worst error of each op, and where tokens part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepinfer.accelerator import all_op_names
from deepinfer.errors import ArgumentError
from deepinfer_conformance.checks.comparison import SHARE
from deepinfer_conformance.outcomes import CaseResult
from deepinfer_conformance.report.document import Document, column_of, results_of


@dataclass(frozen=True, slots=True)
class OpRow:
    """The worst share of the bound of one op in one column, on both sides; None where there is none."""

    op: str
    column: str
    left: float | None
    right: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two reports say of the same cases.

    Attributes:
        left, right: "name version", level reached.
        differing: (case id, outcome on the left, outcome on the right) where they differ.
        only_left, only_right: cases that one side has.
        errors: worst errors per op and column.
        divergences: per token case the first position at which emitted tokens differ, -1 if they agree.
    """

    left: tuple[str, str]
    right: tuple[str, str]
    differing: tuple[tuple[str, str, str], ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    errors: tuple[OpRow, ...]
    divergences: Mapping[str, int]


def compare_reports(left: Document, right: Document) -> Comparison:
    """Compare two reports; ArgumentError if they were made by different suites or from different seeds."""
    problems = [
        f"{what} differ: {one!r} and {other!r}"
        for what, one, other in (
            ("suite versions", left["suite"].get("version"), right["suite"].get("version")),
            ("seeds", left["seed"], right["seed"]),
        )
        if one != other
    ]
    if problems:
        raise ArgumentError("compare", [f"{problem}; such results cannot be compared" for problem in problems])
    mine = {result.id: result for result in results_of(left)}
    theirs = {result.id: result for result in results_of(right)}
    shared = [case_id for case_id in mine if case_id in theirs]
    return Comparison(
        left=(_name(left), left["level_reached"]),
        right=(_name(right), right["level_reached"]),
        differing=tuple(
            (case_id, str(mine[case_id].outcome), str(theirs[case_id].outcome))
            for case_id in shared
            if mine[case_id].outcome is not theirs[case_id].outcome
        ),
        only_left=tuple(case_id for case_id in mine if case_id not in theirs),
        only_right=tuple(case_id for case_id in theirs if case_id not in mine),
        errors=_errors(list(mine.values()), list(theirs.values())),
        divergences={
            case_id: first_difference(mine[case_id].data["tokens"], theirs[case_id].data["tokens"])
            for case_id in shared
            if "tokens" in mine[case_id].data and "tokens" in theirs[case_id].data
        },
    )


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the first position at which two token lists differ (the shorter length if one begins the other), or -1."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return -1 if len(left) == len(right) else min(len(left), len(right))


def _errors(left: Sequence[CaseResult], right: Sequence[CaseResult]) -> tuple[OpRow, ...]:
    mine, theirs = worst_shares(left), worst_shares(right)
    return tuple(
        OpRow(op, column, mine.get((op, column)), theirs.get((op, column)))
        for op in all_op_names()
        for column in sorted({column for name, column in (*mine, *theirs) if name == op})
    )


def worst_shares(results: Sequence[CaseResult]) -> dict[tuple[str, str], float]:
    """Return per (op, column) the largest share of the bound that any case used."""
    worst: dict[tuple[str, str], float] = {}
    for result in results:
        if result.op and result.metric == SHARE and result.value is not None:
            key = (result.op, column_of(result))
            worst[key] = max(worst.get(key, 0.0), result.value)
    return worst


def _name(document: Document) -> str:
    return f"{document['driver'].get('name')} {document['driver'].get('version')}"
