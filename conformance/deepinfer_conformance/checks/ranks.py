"""L3: collectives between processes, and what the others say when one of them is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case, Law
from deepinfer_conformance.outcomes import Finding

DEADLINE_S: Final[Mapping[str, float]] = {
    "all_reduce": 60.0,
    "all_gather": 60.0,
    "all_to_all": 60.0,
    "broadcast": 60.0,
    "barrier": 60.0,
    "dtypes": 60.0,
    "dead_rank": 10.0,
    "silent_rank": 2.0,
    "absent_rank": 2.0,
}
"""What the group of a check is given. The last two take all of theirs: nothing but the deadline ends them."""
MISSING: Final = ("dead_rank", "silent_rank", "absent_rank")
_DYING: Final = {"dead_rank": [1]}


def _run(check: str, bench: Bench, case: Case) -> Sequence[Finding]:
    from deepinfer_conformance.ranks.pool import maker_of, run_ranks

    world = int(str(case.facts["ranks"]))
    reports = run_ranks(maker_of(bench.driver), world, check, deadline_s=DEADLINE_S[check])
    problems = [f"rank {report.rank}: {problem}" for report in reports for problem in report.problems]
    died = {report.rank: report.died for report in reports if report.died is not None}
    if list(died) != _DYING.get(check, []):
        problems.append(f"ranks died, with exit status: {died}; those that are to die: {_DYING.get(check, [])}")
    findings = [Finding("problems", float(len(problems)), 0.0, "; ".join(problems[:5]))]
    if check in MISSING and not problems:
        slowest = max(report.seconds for report in reports)
        findings.append(Finding("seconds to the error / deadline", slowest / DEADLINE_S[check], 2.0))
    return findings


LAWS: Mapping[str, Law] = {check: partial(_run, check) for check in DEADLINE_S}
