"""The same results as JUnit XML, one suite per level, for tools that read nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from deepinfer_conformance.outcomes import CaseResult, Level, Outcome

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")
"""Characters that XML cannot carry; a driver's message may hold any."""


def junit_xml(results: Sequence[CaseResult], title: str) -> str:
    """Return the document: failures are failed claims, errors are crashes and the like, skips what is not claimed."""
    root = ElementTree.Element("testsuites", name=_clean(title))
    for level in Level:
        mine = [result for result in results if result.level is level]
        if not mine:
            continue
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=level.name,
            tests=str(len(mine)),
            failures=str(sum(result.outcome is Outcome.FAIL for result in mine)),
            errors=str(sum(result.outcome in (Outcome.ERROR, Outcome.CRASH, Outcome.TIMEOUT) for result in mine)),
            skipped=str(sum(result.outcome in (Outcome.NOT_CLAIMED, Outcome.WAIVED) for result in mine)),
            time=f"{sum(result.seconds for result in mine):.3f}",
        )
        for result in mine:
            _case(suite, result)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(suite: ElementTree.Element, result: CaseResult) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"{result.level.name}.{result.op or 'driver'}",
        name=result.id,
        time=f"{result.seconds:.4f}",
    )
    match result.outcome:
        case Outcome.PASS | Outcome.REFUSED:
            return
        case Outcome.FAIL:
            kind = "failure"
        case Outcome.NOT_CLAIMED | Outcome.WAIVED:
            kind = "skipped"
        case _:
            kind = "error"
    told = ElementTree.SubElement(
        case, kind, message=_clean(f"{result.outcome}: {result.detail.partition(chr(10))[0]}")
    )
    told.text = _clean(result.detail)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
