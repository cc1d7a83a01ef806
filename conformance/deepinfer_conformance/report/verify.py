"""May this package be published? Everything that stands against it, at once."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence

from deepinfer_conformance.case import Case
from deepinfer_conformance.catalogue import catalogue, parse_profile
from deepinfer_conformance.data.digest import input_sha256
from deepinfer_conformance.levels import ladder, level_reached
from deepinfer_conformance.outcomes import CaseResult, Outcome
from deepinfer_conformance.report.document import Document, results_of
from deepinfer_conformance.version import SUITE_VERSION

_SHOWN = 5
_WITHOUT_INPUTS = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.NOT_CLAIMED)


def verify_report(document: Document, *, today: datetime.date, wanted: Sequence[Case] | None = None) -> list[str]:
    """Return every reason why a report is no valid package; empty if it is one.

    A package is a whole profile, run from an unchanged suite of this version, whose inputs are those of the suite, in
    which nothing claimed has failed, no waiver has expired, and whose level is the one that its results give.

    Args:
        document: a report that was read.
        today: the day by which waivers expire.
        wanted: the cases of a complete package; None for the whole profile that the report names.
    """
    problems: list[str] = []
    results = results_of(document)
    tree = document["suite"].get("tree", {})
    if not tree.get("clean"):
        problems.append(
            f"the suite ran from a changed tree ({tree.get('source')} {tree.get('commit') or 'without commit'})"
        )
    if document["suite"].get("version") != SUITE_VERSION:
        problems.append(f"suite {document['suite'].get('version')!r}; this is {SUITE_VERSION}: run it again")
        return problems
    selection = document["selection"]
    if selection.get("level") or selection.get("ops"):
        problems.append(f"the run was narrowed to {_narrowed(selection)}; a package is a whole profile")
    if wanted is None:
        wanted = catalogue(document["seed"], parse_profile(document["profile"]))
    cases = {case.id: case for case in wanted}
    problems += _completeness(results, cases)
    problems += _inputs(results, cases)
    problems += _outcomes(results)
    for waiver in document["waivers"]:
        if datetime.date.fromisoformat(waiver["expires"]) < today:
            problems.append(f"the waiver of {waiver['case']!r} expired on {waiver['expires']} ({waiver['reason']})")
    reached = level_reached(ladder(results, document["claims"]))
    if reached != document["level_reached"]:
        problems.append(f"level_reached says {document['level_reached']}, the results give {reached}")
    if document["how"] != "device":
        problems.append(f"results are {document['how']}: they do not count as a run on the device")
    return problems


def _completeness(results: Sequence[CaseResult], cases: Mapping[str, Case]) -> list[str]:
    counts = Counter(result.id for result in results)
    problems = []
    for what, ids in (
        ("missing", [case_id for case_id in cases if case_id not in counts]),
        ("unknown to this suite", [case_id for case_id in counts if case_id not in cases]),
        ("listed more than once", [case_id for case_id, count in counts.items() if count > 1]),
    ):
        if ids:
            problems.append(f"{len(ids)} cases are {what}: {_few(ids)}")
    return problems


def _inputs(results: Sequence[CaseResult], cases: Mapping[str, Case]) -> list[str]:
    """Inputs are rebuilt here: a report cannot have been computed from easier ones."""
    wrong = []
    for result in results:
        case = cases.get(result.id)
        if case is None or result.outcome in _WITHOUT_INPUTS:
            continue
        wanted = "" if case.build is None else input_sha256(case.build())
        if result.input_sha256 != wanted:
            wrong.append(result.id)
    return [f"{len(wrong)} cases were computed from other inputs: {_few(wrong)}"] if wrong else []


def _outcomes(results: Sequence[CaseResult]) -> list[str]:
    broken = [result for result in results if not result.outcome.is_good]
    if not broken:
        return []
    counts = Counter(str(result.outcome) for result in broken)
    listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return [f"claims that did not hold: {listed}: {_few([result.id for result in broken])}"]


def _narrowed(selection: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in selection.items() if value)


def _few(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_SHOWN]) + (" ..." if len(ids) > _SHOWN else "")
