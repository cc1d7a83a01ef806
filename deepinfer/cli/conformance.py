"""`deepinfer conformance`: may a driver claim what it claims? A thin layer over `deepinfer_conformance`."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deepinfer.cli import show
from deepinfer.errors import ArgumentError

if TYPE_CHECKING:
    from deepinfer_conformance.case import Case
    from deepinfer_conformance.outcomes import CaseResult
    from deepinfer_conformance.report.compare import Comparison
    from deepinfer_conformance.report.document import Document

_Driver = Annotated[str, typer.Option(metavar="NAME", help="Installed driver, see `deepinfer devices`.")]
_Ops = Annotated[str, typer.Option(metavar="GLOBS", help="Ops to run, parted by commas: 'attention.*,norm.rms'.")]
_Level = Annotated[str, typer.Option(metavar="LEVEL", help="Highest level to run, L0 to L7; unset: all.")]
_Profile = Annotated[
    Literal["quick", "full"], typer.Option(help="quick: about 2 minutes on two cores; full: about 20.")
]
_Seed = Annotated[int, typer.Option(help="Seed of all inputs.")]
_Patience = Annotated[
    float,
    typer.Option(metavar="FACTOR", help="Multiplies every case's time limit: interpreters and emulators need more."),
]


def run(
    ctx: typer.Context,
    *,
    driver: _Driver,
    profile: _Profile = "quick",
    level: _Level = "",
    ops: _Ops = "",
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.json, report.html, junit.xml and support.md here.")
    ] = None,
    seed: _Seed = 0,
    jobs: Annotated[int, typer.Option(help="Child processes; 0: one per processor, at most 4.")] = 0,
    patience: _Patience = 1.0,
) -> None:
    """Run a driver through the suite.

    Status 0 only if every claim held; crashes and hangs of single cases are results, and the run goes on.
    """
    ctx.obj.start_alone(ctx.command_path)
    from deepinfer_conformance.catalogue import parse_level
    from deepinfer_conformance.suite import RunOptions, run_suite, write_package

    chosen_jobs = jobs or min(4, os.cpu_count() or 1)
    options = RunOptions(
        driver, profile, parse_level(level) if level else None, _globs(ops), seed, chosen_jobs, patience=patience
    )
    if profile == "full":
        print("the full profile takes about 20 minutes on two cores", file=sys.stderr)
    document = run_suite(options, _Progress(len(options.cases())))
    if report is not None:
        for path in write_package(document, report):
            print(f"wrote {path}", file=sys.stderr)
    print(_summary(document))
    if set(document["counts"]) - {"pass", "refused", "waived", "not claimed"}:
        raise typer.Exit(1)


def list_cases(
    ctx: typer.Context,
    *,
    profile: _Profile = "quick",
    level: _Level = "",
    ops: _Ops = "",
    seed: _Seed = 0,
    pages: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a Markdown page per op: inputs, shapes, digests.")
    ] = None,
) -> None:
    """List the cases of a profile."""
    ctx.obj.start()
    from deepinfer_conformance.catalogue import catalogue, chosen, parse_level
    from deepinfer_conformance.suite import op_page

    cases = chosen(catalogue(seed, profile), level=parse_level(level) if level else None, ops=_globs(ops))
    if pages is None:
        print("\n".join(case.id for case in cases))
        return
    pages.mkdir(parents=True, exist_ok=True)
    for op in dict.fromkeys(case.op for case in cases if case.op):
        path = pages / f"{op}.md"
        path.write_text(op_page(op, cases))
        print(f"wrote {path}", file=sys.stderr)


def replay(
    ctx: typer.Context,
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case id, or a file that `--capture` wrote.")],
    *,
    driver: _Driver,
    seed: _Seed = 0,
    patience: _Patience = 1.0,
) -> None:
    """Run one case again and show what came out. Status 1 if the claim did not hold."""
    ctx.obj.start_alone(ctx.command_path)
    from deepinfer_conformance.suite import replay as run_again

    result = run_again(driver, case, seed=seed, patience=patience)
    print(_result_text(result))
    if not result.outcome.is_good:
        raise typer.Exit(1)


def verify(
    ctx: typer.Context, report: Annotated[Path, typer.Argument(metavar="REPORT", help="report.json, or its folder.")]
) -> None:
    """Say whether a report is a complete, clean package, and every reason why not (status 1)."""
    ctx.obj.start()
    from deepinfer_conformance.report.document import read_report
    from deepinfer_conformance.report.verify import verify_report

    document = read_report(report)
    problems = verify_report(document, today=datetime.datetime.now(datetime.UTC).date())
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        print(f"error: {report} is no valid package:\n{listed}", file=sys.stderr)
        raise typer.Exit(1)
    name = document["driver"]["name"]
    print(f"{report}: valid; {name} {document['driver']['version']} reaches {document['level_reached']}")


def compare(
    ctx: typer.Context,
    left: Annotated[Path, typer.Argument(metavar="A", help="report.json, or its folder.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
) -> None:
    """Show two reports side by side: levels, outcomes that differ, worst errors, where tokens part."""
    ctx.obj.start()
    from deepinfer_conformance.report.compare import compare_reports
    from deepinfer_conformance.report.document import read_report

    print(_comparison_text(compare_reports(read_report(left), read_report(right))))


def new_driver(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the driver, such as 'acme'.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.")],
) -> None:
    """Write a driver's distribution to begin with: entry point, one native op, declared fallbacks."""
    ctx.obj.start_alone(ctx.command_path)
    from deepinfer_conformance.new_driver import write_template

    for path in write_template(name, directory):
        print(f"wrote {path}")
    print(f"next: pip install -e {directory} && deepinfer conformance run --driver {name} --level L1")


COMMANDS = (
    ("list", list_cases),
    ("run", run),
    ("replay", replay),
    ("verify", verify),
    ("compare", compare),
    ("new-driver", new_driver),
)
"""Name and function of each command of the group, for whoever builds the application."""


class _Progress:
    """A bar on standard error with the case that was last and the time that is left; silent where nobody looks."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="case", disable=not sys.stderr.isatty())

    def __call__(self, case: Case, result: CaseResult) -> None:
        self._bar.set_description(case.op or case.check)
        self._bar.update()
        if not result.outcome.is_good:
            self._bar.write(f"{result.outcome}: {result.id}", file=sys.stderr)
        if self._bar.n == self._bar.total:
            self._bar.close()


def _globs(text: str) -> tuple[str, ...]:
    globs = tuple(word.strip() for word in text.split(",")) if text else ()
    if "" in globs:
        raise ArgumentError("--ops", [f"{text!r} holds an empty name; write globs parted by commas"])
    return globs


def _summary(document: Document) -> str:
    driver = document["driver"]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in document["counts"].items())
    rows = [(level["level"], level["standing"], level["why"]) for level in document["levels"]]
    head = f"{driver['name']} {driver['version']} on {driver['device']} ({document['how']}): {counts}"
    return "\n".join(
        [head, "", show.table(("level", "standing", "why"), rows), "", f"level reached: {document['level_reached']}"]
    )


def _result_text(result: CaseResult) -> str:
    facts: list[tuple[str, object]] = [
        ("outcome", str(result.outcome)),
        ("metric", result.metric or "-"),
        ("value", result.value),
        ("bound", result.bound),
        ("reference", result.reference_error),
        ("seed", result.seed),
        ("inputs", result.input_sha256 or "-"),
        ("seconds", result.seconds),
    ]
    lines = [f"  {label:<10}  {'-' if value is None else value}" for label, value in facts]
    detail = [show.printable(line) for line in result.detail.splitlines()]
    return "\n".join([result.id, *lines, *(f"  {line}" for line in detail)])


def _comparison_text(found: Comparison) -> str:
    lines = [f"A  {found.left[0]}  {found.left[1]}", f"B  {found.right[0]}  {found.right[1]}", ""]
    lines += [f"{len(found.differing)} outcomes differ"]
    lines += [f"  {case}: {one} | {other}" for case, one, other in found.differing[:50]]
    for side, only in (("A", found.only_left), ("B", found.only_right)):
        if only:
            lines.append(f"{len(only)} cases only in {side}, first {only[0]}")
    for case, position in found.divergences.items():
        lines.append(f"tokens of {case}: {'the same' if position < 0 else f'part at position {position}'}")
    rows = [(row.op, row.column, _share(row.left), _share(row.right)) for row in found.errors]
    return "\n".join([*lines, "", show.table(("op", "dtype", "A: error/bound", "B"), rows)])


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.3g}"
