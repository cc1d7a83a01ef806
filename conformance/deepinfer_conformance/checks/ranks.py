"""L3: collectives between processes. The parent names the rank that died; Gloo and its like do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case, Law
from deepinfer_conformance.outcomes import Finding

EXCHANGES: Final = ("all_reduce", "all_gather", "all_to_all", "broadcast", "barrier", "dtypes")
DEAD_RANK: Final = "dead_rank"
DEADLINE_S: Final = 70.0
"""The contract's groups have a deadline of 60 s; some room for the start of the exchange."""


def _exchange(check: str, bench: Bench, case: Case) -> Sequence[Finding]:
    from deepinfer_conformance.ranks.pool import maker_of, run_ranks

    world = int(str(case.facts["ranks"]))
    problems = []
    for report in run_ranks(maker_of(bench.driver), world, check):
        problems += [f"rank {report.rank}: {problem}" for problem in report.problems]
        if report.died is not None:
            problems.append(f"rank {report.rank} died with exit status {report.died}")
    return [Finding("problems", float(len(problems)), 0.0, "; ".join(problems[:5]))]


def dead_rank(bench: Bench, case: Case) -> Sequence[Finding]:
    """Rank 1 dies before the exchange: every other rank raises within the deadline, and the parent says who died."""
    from deepinfer_conformance.ranks.pool import maker_of, run_ranks

    world = int(str(case.facts["ranks"]))
    reports = run_ranks(maker_of(bench.driver), world, DEAD_RANK, deadline_s=DEADLINE_S)
    problems = [f"rank {report.rank}: {problem}" for report in reports for problem in report.problems]
    dead = [report.rank for report in reports if report.died is not None]
    if dead != [1]:
        problems.append(f"ranks {dead} died; only rank 1 was to")
    slowest = max(report.seconds for report in reports)
    return [
        Finding("problems", float(len(problems)), 0.0, "; ".join(problems[:5])),
        Finding("seconds to the error", slowest, DEADLINE_S, f"the slowest rank took {slowest:.3g} s to notice"),
    ]


LAWS: Mapping[str, Law] = {**{check: partial(_exchange, check) for check in EXCHANGES}, DEAD_RANK: dead_rank}
