"""One case in this process: from claims and findings to an outcome."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence

import torch

from deepinfer.errors import OpRefusedError
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.claims import Standing, how, standing
from deepinfer_conformance.data.digest import input_sha256
from deepinfer_conformance.outcomes import CaseResult, Finding, Outcome
from deepinfer_conformance.waivers import Waiver

_LONGEST_DETAIL = 2000
_WAIVABLE = (Outcome.FAIL, Outcome.ERROR)


def attempt(case: Case, bench: Bench, waivers: Sequence[Waiver] = ()) -> CaseResult:
    """Run a case and return its line of the report; whatever the driver raises becomes an outcome."""
    started = time.perf_counter()
    capabilities = bench.driver.capabilities()
    place = standing(case, capabilities)
    asked = place.standing is not Standing.NOT_CLAIMED
    digest = input_sha256(case.build()) if asked and case.build is not None else ""
    findings: Sequence[Finding] = ()
    outcome, detail = Outcome.NOT_CLAIMED, place.why
    if asked:
        try:
            findings = case.law(bench, case)
        except OpRefusedError as error:
            refused_rightly = place.standing is Standing.OUTSIDE
            outcome = Outcome.REFUSED if refused_rightly else Outcome.FAIL
            detail = str(error) if refused_rightly else f"claimed, and refused: {error}"
        except (MemoryError, torch.OutOfMemoryError) as error:
            outcome, detail = Outcome.ERROR, f"out of memory: {type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - any error of a driver is a result of its case
            outcome, detail = Outcome.ERROR, _told(error)
        else:
            outcome, detail = _judged(findings, place.standing, place.why)
    outcome, detail = _waived(case, bench, waivers, outcome, detail)
    worst = max(findings, key=lambda finding: (not finding.holds, finding.share), default=None)
    return CaseResult(
        id=case.id,
        op=case.op,
        level=case.level,
        check=case.check,
        dtype=str(case.options.activation_dtype).removeprefix("torch."),
        numerics=case.options.numerics,
        kv_cache_dtype=case.options.kv_cache_dtype,
        how=how(case, capabilities),
        outcome=outcome,
        metric="" if worst is None else worst.metric,
        value=None if worst is None else worst.value,
        bound=None if worst is None else worst.bound,
        reference_error=None if worst is None else worst.reference_error,
        seed=case.seed,
        input_sha256=digest,
        seconds=round(time.perf_counter() - started, 4),
        detail=detail[:_LONGEST_DETAIL],
        data={name: list(values) for finding in findings for name, values in finding.data.items()},
    )


def _judged(findings: Sequence[Finding], place: Standing, why: str) -> tuple[Outcome, str]:
    if place is Standing.OUTSIDE:
        return Outcome.FAIL, f"{why}; the driver computed it all the same instead of refusing"
    broken = [finding for finding in findings if not finding.holds]
    if broken:
        return Outcome.FAIL, "\n".join(finding.detail or finding.metric for finding in broken[:5])
    return Outcome.PASS, ""


def _waived(case: Case, bench: Bench, waivers: Sequence[Waiver], outcome: Outcome, detail: str) -> tuple[Outcome, str]:
    if outcome not in _WAIVABLE:
        return outcome, detail
    driver = bench.driver
    device = type(driver).availability().device_name
    for waiver in waivers:
        if waiver.covers(driver.name, driver.version, device, case.id):
            return Outcome.WAIVED, f"waived until {waiver.expires}: {waiver.reason} ({waiver.link})\n{detail}"
    return outcome, detail


def _told(error: Exception) -> str:
    last = "".join(traceback.format_exception(error)[-4:])
    return f"{type(error).__name__}: {error}\n{last}"
