"""The suite as its callers see it: run a driver and write its report, replay a case, describe the cases.

Needs nothing of the command line; the command group and the pytest plugin are thin layers over this module.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import ArgumentError
from deepinfer_conformance.case import Case, Profile
from deepinfer_conformance.catalogue import captured_case, catalogue, chosen
from deepinfer_conformance.data.call import tensors
from deepinfer_conformance.data.digest import input_sha256
from deepinfer_conformance.data.stored import SUFFIX
from deepinfer_conformance.outcomes import CaseResult, Level
from deepinfer_conformance.report.document import Document, RunFacts, build_report, results_of, write_report
from deepinfer_conformance.report.facts import now
from deepinfer_conformance.report.junit import junit_xml
from deepinfer_conformance.report.page import html_page, support_markdown
from deepinfer_conformance.runner.pool import Watcher, run_in_children
from deepinfer_conformance.runner.process import Order
from deepinfer_conformance.waivers import Waiver, packaged_waivers, refuse_expired

_DAYS_ARE_UTC = datetime.UTC


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What to run.

    Attributes:
        driver: name of an installed driver.
        profile: "quick" or "full".
        level: the highest level to run; None for all.
        ops: globs of ops; none for all ops and the checks of the whole driver.
        seed: of the inputs.
        jobs: child processes at a time.
        waivers: in force; None for those that come with the suite.
        patience: what the cases' time limits are multiplied by.
    """

    driver: str
    profile: Profile = "quick"
    level: Level | None = None
    ops: tuple[str, ...] = ()
    seed: int = 0
    jobs: int = 1
    waivers: tuple[Waiver, ...] | None = None
    patience: float = 1.0

    def cases(self) -> tuple[Case, ...]:
        """Return the cases in the order in which they run; ArgumentError if nothing is chosen."""
        cases = chosen(catalogue(self.seed, self.profile), level=self.level, ops=self.ops)
        if not cases:
            # An empty run would end as if every claim had held.
            asked = f"ops {', '.join(self.ops)} up to level {self.level.name if self.level is not None else 'L7'}"
            raise ArgumentError("choice of cases", [f"no case of {asked}; see `deepinfer conformance list`"])
        return cases


def run_suite(options: RunOptions, watcher: Watcher | None = None) -> Document:
    """Run a driver through the suite and return the report.

    Raises:
        DriverLoadError: the driver cannot be started.
        ArgumentError: nothing is chosen, ``jobs`` is below 1, the patience is not positive, or a waiver of
            this driver has expired.
    """
    if options.jobs < 1:
        raise ArgumentError("jobs", [f"{options.jobs}: one child process is the least"])
    waivers = packaged_waivers() if options.waivers is None else options.waivers
    refuse_expired(waivers, options.driver, datetime.datetime.now(_DAYS_ARE_UTC).date())
    cases = options.cases()
    started, begun = now(), time.monotonic()
    order = Order(options.driver, options.seed, options.profile, waivers_as_toml(waivers), patience=options.patience)
    run = run_in_children(cases, order, jobs=options.jobs, watcher=watcher)
    level = options.level.name if options.level is not None else ""
    facts = RunFacts(options.profile, options.seed, level, options.ops, started, time.monotonic() - begun)
    return build_report(run.results, run.facts, facts, waivers)


def write_package(document: Document, folder: Path) -> tuple[Path, ...]:
    """Write report.json, report.html, junit.xml and support.md; return their paths."""
    paths = [write_report(document, folder)]
    driver = document["driver"]
    for name, text in (
        ("report.html", html_page(document)),
        ("junit.xml", junit_xml(results_of(document), f"{driver['name']} {driver['version']}")),
        ("support.md", support_markdown(document)),
    ):
        path = folder / name
        path.write_text(text)
        paths.append(path)
    return tuple(paths)


def replay(driver: str, case_id: str, *, seed: int = 0, patience: float = 1.0) -> CaseResult:
    """Run one case, or one captured call by its file, in a child process and return its result.

    Raises:
        ArgumentError: there is no such case and no such file, or the patience is not positive.
    """
    path = Path(case_id)
    case = captured_case(path) if path.suffix == SUFFIX else chosen(catalogue(seed, "full"), ids=[case_id])[0]
    order = Order(driver, seed, "full", waivers_as_toml(packaged_waivers()), patience=patience)
    (result,) = run_in_children([case], order).results
    return result


def waivers_as_toml(waivers: Sequence[Waiver]) -> str:
    """Return waivers as the text that `parse_waivers` reads."""
    entries = []
    for waiver in waivers:
        fields = waiver.as_json()
        lines = [f"{name} = {_quoted(value)}" for name, value in fields.items() if name != "expires"]
        entries.append("\n".join(["[[waiver]]", *lines, f"expires = {fields['expires']}"]))
    return "\n".join(entries)


def op_page(op: str, cases: Sequence[Case]) -> str:
    """Return a Markdown page with every case of an op: identifier, inputs, digest."""
    lines = [f"# Cases of `{op}`", ""]
    for case in cases:
        if case.op != op:
            continue
        lines += [f"## `{case.id}`", ""]
        if case.build is None:
            continue
        call = case.build()
        lines += [
            f"Inputs SHA-256 `{input_sha256(call)}`",
            "",
            "| argument | dtype | shape | strides |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| `{name}` | {str(tensor.dtype).removeprefix('torch.')} | {tuple(tensor.shape)} | {tensor.stride()} |"
            for name, tensor in tensors(call.arguments)
        ]
        lines.append("")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
