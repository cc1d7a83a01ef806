"""``python -m deepinfer_ascend.lowering_check``: status 0 if every kernel that the driver may take was lowered.

Status 1 if one was not, 2 if none could be. Kernels of ops for which it has an operator are reported as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from deepinfer.errors import DeepInferError, DriverUnavailableError
from deepinfer_ascend.lowering_check.report import Entry, Report
from deepinfer_ascend.lowering_check.tools import Tools

CHIPS: Final = ("Ascend950PR_9599", "Ascend950DT_9591")
COULD_NOT_START: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        tools = Tools.found_in(options.tools)
        entries = _checked(tools, options)
    except DeepInferError as error:
        sys.stderr.write(f"{error}\n")
        return COULD_NOT_START
    versions = {"triton": version("triton"), "triton-ascend": "3.2.0", "ascendnpu-ir": "1.2.0"}
    report = Report(versions, tuple(entries))
    report.write(options.report)
    for other in report.others:
        sys.stderr.write(f"not lowered, and not taken by this driver: {other}\n")
    for failure in report.failures:
        sys.stderr.write(f"{failure}\n")
    for how in dict.fromkeys(entry.how for entry in entries):
        forms = {(entry.kernel, entry.configuration, entry.soc): entry.status for entry in entries if entry.how == how}
        good = sum(status == "ok" for status in forms.values())
        sys.stdout.write(f"{good} of {len(forms)} {how}; {options.report}\n")
    return 1 if report.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepinfer_ascend.lowering_check", description=main.__doc__)
    parser.add_argument("--report", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--tools", type=Path, required=True, help="folder that `.ci/ascend_tools` filled")
    parser.add_argument("--soc", action="append", help=f"chip to lower for; may be repeated; {', '.join(CHIPS)}")
    parser.add_argument("--kernels", action="append", default=[], help="part of a kernel's or an op's name")
    parser.add_argument("--most", type=int, metavar="N", help="at most N configurations of each kernel; without, all")
    parser.add_argument("--execute", action="store_true", help="also run some lowered kernels on this machine (x86_64)")
    return parser


def _checked(tools: Tools, options: argparse.Namespace) -> list[Entry]:
    if find_spec("triton") is None:
        raise DriverUnavailableError(
            "triton is not installed: it makes the code that is lowered. In a checkout: "
            "`.ci/overlay python FOLDER triton==3.9.0` makes an environment of its own"
        )
    from deepinfer_ascend.lowering_check import kernels, lowering

    found = list(kernels.matching(kernels.candidates(), options.kernels))
    if not found:
        raise DriverUnavailableError(f"no kernel is named like {', '.join(options.kernels)}")
    chosen = found if options.most is None else kernels.some_of_each(found, max(1, options.most))
    if len(chosen) < len(found):
        sys.stdout.write(f"{len(chosen)} of {len(found)} configurations were chosen\n")
    entries = list(lowering.check(tools, chosen, options.soc or CHIPS))
    if options.execute:
        from deepinfer_ascend.lowering_check import execution

        entries += execution.check(tools)
    return entries


if __name__ == "__main__":
    sys.exit(main())
