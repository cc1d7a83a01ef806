"""``python -m deepinfer_ascend.support_table``: op by chip, how it is proved, as Markdown.

It reads the reports of the call check and of the lowering check. Only the words of the four proofs are used, and
"ran on Ascend" is none that a report without a chip can give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from deepinfer.accelerator.ops import all_op_names
from deepinfer_ascend.call_check.report import Entry as Call
from deepinfer_ascend.call_check.report import read_entries
from deepinfer_ascend.capabilities import ATEN, HOST, claims_of
from deepinfer_ascend.lowering_check.report import Entry as Lowered
from deepinfer_ascend.lowering_check.report import read_report
from deepinfer_ascend.soc import DEFAULT_NAMES, detect

COMMAND: Final = "python -m deepinfer_ascend.support_table --calls CALLS.json --lowering LOWERING.json --output {path}"
UNTRIED: Final = {HOST: "host code", ATEN: "torch code, not call-checked"}
"""What is said of an op that no call check tries, by provider."""
NOT_TRIED: Final = "not called"
_WORDS: Final = """
`fallback`: the driver has no operator for it; the plan names it and `cpu_ref` computes it. `host code`: nothing of it
reaches the device but copies. `torch code`: torch's own operators, tested on the host. **Call-checked** (schema and
Meta kernels of torch-npu 2.13; the real torch-npu on an emulated device whose kernels are ours): the calls are right,
not the vendor's results. **Lowered** (n of the m configurations of the portable Triton kernels that were tried, to HIVM
for that chip, buffers included): everything up to CANN's last step. **Executed on x86**: the lowered Linalg form,
against torch. Nothing has *run on Ascend*; Triton kernels are taken only where an installed Triton compiles for NPUs.
"""


def table(calls: Sequence[Call], lowered: Sequence[Lowered], chips: Sequence[str] = DEFAULT_NAMES) -> str:
    """Return the table of every op of the contract."""
    lines = [f"| op | {' | '.join(chips)} | executed on x86 |", "| --- |" + " --- |" * (len(chips) + 1)]
    executed = {entry.op: entry.status for entry in lowered if entry.how == "executed on x86"}
    for op in all_op_names():
        cells = ["; ".join(_words(op, soc, calls, lowered)) for soc in chips]
        ran = {"ok": "yes", "failed": "**failed**"}.get(executed.get(op, ""), "")
        lines.append(f"| `{op}` | {' | '.join(cells)} | {ran} |")
    return "\n".join(lines)


def _words(op: str, soc: str, calls: Sequence[Call], lowered: Sequence[Lowered]) -> Iterator[str]:
    chip = detect(soc)
    claim = claims_of(chip).ops.get(op) if chip is not None else None
    if claim is None:
        yield "fallback"
    else:
        tried = [entry for entry in calls if (entry.op, entry.soc) == (op, soc)]
        ways = ", ".join(dict.fromkeys(entry.how for entry in tried))
        failed = any(entry.status == "failed" for entry in tried)
        untried = UNTRIED.get(claim.provider, NOT_TRIED)
        yield "**call check failed**" if failed else f"call-checked ({ways})" if tried else untried
        if len(claim.numerics) == 1:
            yield "served: fallback"
    forms = {
        (entry.kernel, entry.configuration): entry.status
        for entry in lowered
        if entry.op in (op, op.partition(".")[0]) and (entry.soc, entry.how) == (soc, "lowered")
    }
    if forms:
        good = sum(status == "ok" for status in forms.values())
        yield f"lowered {good} of {len(forms)}"


def page(calls: Sequence[Call], lowered: Sequence[Lowered], versions: str, path: Path) -> str:
    """Return the whole page, with the command that made it."""
    head = f"# Support table of `ascend`\n\nWritten by `{COMMAND.format(path=path)}`"
    made = (
        f" from the reports of `call_check` and `lowering_check --execute` ({versions}); `.ci/run` makes all three.\n"
    )
    return f"{head}{made}{_WORDS}\n{table(calls, lowered)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_ascend.support_table", description=main.__doc__)
    parser.add_argument("--calls", type=Path, required=True, help="report of the call check")
    parser.add_argument("--lowering", type=Path, required=True, help="report of the lowering check")
    parser.add_argument("--output", type=Path, default=Path("docs/support-ascend.md"), help="page to write")
    options = parser.parse_args(arguments)
    report = read_report(options.lowering)
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    options.output.write_text(page(read_entries(options.calls), report.entries, versions, options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
