"""One self-contained HTML page of a report, and the support table as Markdown for the documentation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment

from deepinfer_conformance.outcomes import LEVEL_TITLES, CaseResult, Level
from deepinfer_conformance.report.compare import worst_shares
from deepinfer_conformance.report.document import COLUMNS, Document, results_of

_PLOT_WIDTH = 320
_SMALLEST_SHARE = 1e-4


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the error plot: the share of the bound that was used, on a logarithmic scale from 1e-4 to 1."""

    op: str
    column: str
    share: float
    reference: float | None

    @property
    def width(self) -> int:
        """Pixels of the driver's bar."""
        return _pixels(self.share)

    @property
    def mark(self) -> int | None:
        """Pixel of the reference's own error."""
        return None if self.reference is None else _pixels(self.reference)


def html_page(document: Document) -> str:
    """Return the page; it loads nothing from anywhere."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = resources.files("deepinfer_conformance.report").joinpath("page.html.j2").read_text()
    results = results_of(document)
    return environment.from_string(template).render(
        report=document,
        titles={level.name: title for level, title in LEVEL_TITLES.items()},
        columns=COLUMNS,
        broken=[result for result in results if not result.outcome.is_good],
        bars=_bars(results),
        groups=_groups(results),
        plot_width=_PLOT_WIDTH,
        level_number=-1 if document["level_reached"] == "none" else int(document["level_reached"][1:]),
    )


def support_markdown(document: Document) -> str:
    """Return the support table as Markdown: ops by columns, written by a run and never by hand."""
    driver = document["driver"]
    lines = [
        f"# Support table of `{driver['name']}`",
        "",
        f"Written by `deepinfer conformance run --driver {driver['name']} --report DIR` (support.md), suite "
        f"{document['suite']['version']}, profile {document['profile']}, driver {driver['version']}. "
        f"Level reached: **{document['level_reached']}** ({document['how']}).",
        "",
        "| level | standing | why |",
        "| --- | --- | --- |",
        *(
            f"| {level['level']} {LEVEL_TITLES[Level[level['level']]]} | {level['standing']} | {level['why']} |"
            for level in document["levels"]
        ),
        "",
        f"| op | {' | '.join(COLUMNS)} | repeatability | provider |",
        f"| --- |{' --- |' * len(COLUMNS)} --- | --- |",
    ]
    for op, row in document["support"].items():
        cells = " | ".join(row[column] or "-" for column in COLUMNS)
        lines.append(f"| `{op}` | {cells} | {row['repeatability'] or '-'} | {row['provider'] or '-'} |")
    return "\n".join(lines) + "\n"


def _bars(results: Sequence[CaseResult]) -> list[Bar]:
    own: dict[tuple[str, str], float] = {}
    for result in results:
        if result.reference_error is not None:
            key = (result.op, result.dtype if result.numerics == "portable" else f"{result.dtype} {result.numerics}")
            own[key] = max(own.get(key, 0.0), result.reference_error)
    shares = worst_shares(results)
    return [Bar(op, column, share, own.get((op, column))) for (op, column), share in shares.items()]


@dataclass(frozen=True, slots=True)
class Group:
    """The cases of one op (or of the whole driver) at one level."""

    title: str
    good: int
    results: tuple[CaseResult, ...]


def _groups(results: Sequence[CaseResult]) -> list[Group]:
    keys = dict.fromkeys((result.level, result.op) for result in results)
    groups = []
    for level, op in keys:
        mine = tuple(result for result in results if result.level is level and result.op == op)
        groups.append(Group(f"{level.name} {op or 'driver'}", sum(result.outcome.is_good for result in mine), mine))
    return groups


def _pixels(share: float) -> int:
    if not share > _SMALLEST_SHARE:
        return 1
    if math.isinf(share):
        return _PLOT_WIDTH + 40
    decades = -math.log10(_SMALLEST_SHARE)
    return min(_PLOT_WIDTH + 40, round(_PLOT_WIDTH * (1 + math.log10(share) / decades)))
