"""`deepinfer devices`: every installed driver, and what it says about this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.cli import show

if TYPE_CHECKING:
    from deepinfer.accelerator.survey import DriverReport


def devices(
    ctx: typer.Context, *, as_json: Annotated[bool, typer.Option("--json", help="Write JSON, with every op.")] = False
) -> None:
    """Show every installed driver and its state.

    Available, unavailable or failed to load; each with the reasons and what to do about them.
    """
    ctx.obj.start()
    from deepinfer.accelerator.survey import as_json as report_as_json
    from deepinfer.accelerator.survey import survey

    reports = survey()
    if as_json:
        print(show.pretty_json([report_as_json(report) for report in reports]))
        return
    print("\n\n".join(_text(report) for report in reports))


def _text(report: DriverReport) -> str:
    facts = [("registered", report.origin)]
    if report.version:
        facts.append(("version", f"{report.version}, interface {report.interface_version}"))
    facts.append(("device", report.device or "none"))
    if report.runtime:
        facts.append(("runtime", report.runtime))
    claims = report.capabilities
    if claims is not None:
        levels = sorted({int(claim.repeatability) for claim in claims.ops.values()})
        dtypes = sorted({str(dtype).removeprefix("torch.") for claim in claims.ops.values() for dtype in claim.dtypes})
        numerics = sorted({mode for claim in claims.ops.values() for mode in claim.numerics})
        facts += [
            ("ops", str(len(claims.ops))),
            ("dtypes", ", ".join(dtypes) or "none"),
            ("numerics", ", ".join(numerics) or "none"),
            ("repeatability", ", ".join(f"R{level}" for level in levels) or "none"),
            ("graphs", "yes" if claims.graphs else "no"),
            ("collectives", ", ".join(claims.collectives) or "none"),
        ]
        if claims.declared_fallbacks:
            facts.append(("fallbacks", ", ".join(claims.declared_fallbacks)))
    for reason in report.reasons:
        facts += [("why not", reason.problem), ("to do", reason.remedy)]
    lines = [f"  {label:<13}  {text}" for label, text in facts]
    return "\n".join([f"{report.name}: {report.state}", *lines])
