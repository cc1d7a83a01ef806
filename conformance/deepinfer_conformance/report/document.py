"""``report.json``: built from results, written, read back and checked against its schema.

Top level, schema 1:

==================  ===================================================================================================
schema              1
suite               version, tree (source, commit, clean, digest)
driver              name, version, interface_version, distribution, distribution_version, digest, device, runtime
claims              what the driver claims, as ``deepinfer devices --json`` shows it
environment         python, platform, processors, torch, numpy, cpu_capability, core_interface, variables
profile, seed       of the run
selection           level and op globs that the run was narrowed to; empty for a whole profile
started, seconds    when, and how long
how                 "device", "interpreted" or "emulated": the weakest of the cases
level_reached       "none" or "L0" to "L7"
levels              per level: standing (reached, n/a, not claimed, failed, not run) and why
counts              cases per outcome
support             per op: per column (dtype and numerics) the worst outcome at L1, and the repeatability claimed
waivers             those of this driver, with their expiry
cases               `deepinfer_conformance.outcomes.CaseResult`, one per case
==================  ===================================================================================================
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deepinfer.accelerator import all_op_names
from deepinfer.errors import ArgumentError
from deepinfer_conformance.claims import HOW_WORDS
from deepinfer_conformance.levels import ladder, level_reached
from deepinfer_conformance.outcomes import CaseResult, Level, Outcome
from deepinfer_conformance.report.facts import suite_facts
from deepinfer_conformance.report.plain import line_problems, result_as_json, result_from_json
from deepinfer_conformance.version import SCHEMA_VERSION
from deepinfer_conformance.waivers import Waiver

Document = dict[str, Any]
REPORT_NAME: Final = "report.json"
_TOP: Final[Mapping[str, type | tuple[type, ...]]] = {
    "schema": int,
    "suite": dict,
    "driver": dict,
    "claims": dict,
    "environment": dict,
    "profile": str,
    "seed": int,
    "selection": dict,
    "started": str,
    "seconds": (int, float),
    "how": str,
    "level_reached": str,
    "levels": list,
    "counts": dict,
    "support": dict,
    "waivers": list,
    "cases": list,
}
_WORST_FIRST: Final = (
    Outcome.CRASH, Outcome.TIMEOUT, Outcome.ERROR, Outcome.FAIL, Outcome.WAIVED, Outcome.PASS, Outcome.REFUSED,
    Outcome.NOT_CLAIMED,
)  # fmt: skip
COLUMNS: Final = ("float32", "bfloat16", "bfloat16 served", "float64")
FALLBACK: Final = "fallback"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """How a run was made."""

    profile: str
    seed: int
    level: str
    ops: tuple[str, ...]
    started: str
    seconds: float


def build_report(
    results: Sequence[CaseResult], facts: Mapping[str, Any], run: RunFacts, waivers: Sequence[Waiver]
) -> Document:
    """Return the whole report of one run."""
    states = ladder(results, facts["claims"])
    return {
        "schema": SCHEMA_VERSION,
        "suite": suite_facts(),
        "driver": facts["driver"],
        "claims": facts["claims"],
        "environment": facts["environment"],
        "profile": run.profile,
        "seed": run.seed,
        "selection": {"level": run.level, "ops": list(run.ops)},
        "started": run.started,
        "seconds": round(run.seconds, 2),
        "how": _weakest([result.how for result in results]),
        "level_reached": level_reached(states),
        "levels": [state.as_json() for state in states],
        "counts": dict(sorted(Counter(str(result.outcome) for result in results).items())),
        "support": support_table(results, facts["claims"]),
        "waivers": [waiver.as_json() for waiver in waivers if waiver.driver == facts["driver"]["name"]],
        "cases": [result_as_json(result) for result in results],
    }


def support_table(results: Sequence[CaseResult], claims: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return per op the worst L1 outcome in each column, "fallback" where cpu_ref serves, and the level claimed."""
    table: dict[str, dict[str, str]] = {}
    for op in all_op_names():
        mine = [
            result for result in results if result.op == op and result.level is Level.L1 and result.check != "refusal"
        ]
        row = {}
        for column in COLUMNS:
            outcomes = [result.outcome for result in mine if column_of(result) == column]
            if op in claims["declared_fallbacks"] and op not in claims["ops"]:
                row[column] = FALLBACK
            elif outcomes:
                row[column] = str(min(outcomes, key=_WORST_FIRST.index))
            else:
                row[column] = ""
        row["repeatability"] = claims["ops"][op]["repeatability"] if op in claims["ops"] else ""
        row["provider"] = claims["ops"][op]["provider"] if op in claims["ops"] else ""
        table[op] = row
    return table


def column_of(result: CaseResult) -> str:
    """Return the column of the support table to which a result belongs."""
    return result.dtype if result.numerics == "portable" else f"{result.dtype} {result.numerics}"


def write_report(document: Document, folder: Path) -> Path:
    """Write ``report.json`` into a folder, made if need be; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT_NAME
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return path


def read_report(path: Path) -> Document:
    """Return a report that was written by this schema.

    Raises:
        ArgumentError: there is none, it is no JSON, it is of another schema, or its parts are wrong: all at once.
    """
    file = path / REPORT_NAME if path.is_dir() else path
    if not file.is_file():
        raise ArgumentError(
            str(path), [f"there is no report; `deepinfer conformance run --report DIR` writes {REPORT_NAME}"]
        )
    try:
        document = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(str(file), [f"not JSON: {error}; the file is damaged, run the suite again"]) from error
    problems = document_problems(document)
    if problems:
        raise ArgumentError(str(file), problems)
    found: Document = document
    return found


def document_problems(document: object) -> list[str]:
    """Return what is wrong with a report's shape; at most 20 problems, of one schema."""
    if not isinstance(document, dict):
        return ["a report is a JSON object"]
    if document.get("schema") != SCHEMA_VERSION:
        return [
            f"schema is {document.get('schema')!r}, this suite reads {SCHEMA_VERSION}: "
            f"run the suite again, or read it with the suite that wrote it"
        ]
    problems = [f"{name!r} is missing" for name in _TOP if name not in document]
    problems += [
        f"{name!r} is a {type(document[name]).__name__}"
        for name, kind in _TOP.items()
        if name in document and not isinstance(document[name], kind)
    ]
    problems += [f"{name!r} is unknown" for name in sorted(set(document) - set(_TOP))]
    cases = document.get("cases")
    if isinstance(cases, list):
        for number, line in enumerate(cases):
            problems += line_problems(line, number)
    return problems[:20]


def results_of(document: Document) -> tuple[CaseResult, ...]:
    """Return the results of a report that was read."""
    return tuple(result_from_json(line) for line in document["cases"])


def _weakest(hows: Sequence[str]) -> str:
    for word in HOW_WORDS:
        if word in hows:
            return word
    return "device"
