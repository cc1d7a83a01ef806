"""``python -m deepinfer_ascend.call_check``: exit status 0 if every call went well, 1 if not, 2 if none could start."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from deepinfer.errors import DeepInferError
from deepinfer_ascend import runtime
from deepinfer_ascend.call_check import stubs
from deepinfer_ascend.call_check.checking import check, uncovered
from deepinfer_ascend.call_check.report import Entry, Report, merged, read_entries
from deepinfer_ascend.soc import DEFAULT_NAMES, Soc, detect

COULD_NOT_START = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit status."""
    options = _parser().parse_args(arguments)
    chips, unknown = _chips(options.soc or list(DEFAULT_NAMES))
    if unknown:
        sys.stderr.write(f"unknown SoC {', '.join(unknown)}; known, for example: {', '.join(DEFAULT_NAMES)}\n")
        return COULD_NOT_START
    try:
        if options.emulated_child:
            report = _emulated(chips[0], options.host_cann)
        else:
            report = _meta(chips)
            if options.host_cann is not None:
                report = _with_emulated(report, chips, options.host_cann)
    except DeepInferError as error:
        sys.stderr.write(f"{error}\n")
        return COULD_NOT_START
    report.write(options.report)
    if options.table is not None:
        options.table.write_text(report.table())
    for failure in report.failures:
        sys.stderr.write(f"{failure}\n")
    good = sum(entry.status == "ok" for entry in report.entries)
    sys.stdout.write(f"{good} of {len(report.entries)} calls as expected; {options.report}\n")
    return 1 if report.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deepinfer_ascend.call_check", description=main.__doc__)
    parser.add_argument("--report", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--soc", action="append", help="chip to check for, by name; may be repeated")
    parser.add_argument("--host-cann", type=Path, help="folder that holds the package host_cann (an emulated device)")
    parser.add_argument("--table", type=Path, help="Markdown table of ops and chips to write")
    parser.add_argument("--emulated-child", action="store_true", help=argparse.SUPPRESS)
    return parser


def _chips(names: Sequence[str]) -> tuple[list[Soc], list[str]]:
    found = [(name, detect(name)) for name in names]
    return [chip for _, chip in found if chip is not None], [name for name, chip in found if chip is None]


def _meta(chips: Sequence[Soc]) -> Report:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deepinfer-call-check-"))
        stubs.load(Path(folder))
        importlib.import_module("torch_npu")
        entries = [entry for chip in chips for entry in check(chip, "meta")]
    return merged(_versions(), entries, uncovered())


def _with_emulated(report: Report, chips: Sequence[Soc], host_cann: Path) -> Report:
    """Run one process a chip: a process has one emulated machine for life."""
    entries: list[Entry] = list(report.entries)
    problems = list(report.problems)
    with tempfile.TemporaryDirectory(prefix="deepinfer-call-check-") as folder:
        for chip in chips:
            path = Path(folder) / f"{chip.name}.json"
            command = [sys.executable, "-m", "deepinfer_ascend.call_check", "--emulated-child", "--soc", chip.name]
            command += ["--host-cann", str(host_cann), "--report", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (this program)
            if path.exists():
                entries += read_entries(path)
            else:
                problems.append(f"the emulated check of {chip.name} ended with {done.returncode}: {done.stderr[-400:]}")
    return merged(report.versions, entries, problems)


def _emulated(chip: Soc, host_cann: Path) -> Report:
    sys.path.insert(0, str(host_cann.resolve()))
    # The emulator knows 950s by their name and the older chips by their family.
    name = chip.name if chip.has_mx else f"Ascend{chip.family}"
    emulator = importlib.import_module("host_cann").load(name)
    entries = list(check(chip, "emulated", torch.device("npu", 0), lambda: _calls_only(emulator)))
    return merged(_versions(), entries, [])


@contextmanager
def _calls_only(emulator: Any) -> Iterator[None]:
    """Let operators without a host kernel pass: the check looks at calls, never at results."""
    with emulator.calls_only():
        yield
        runtime.npu().synchronize()


def _versions() -> list[tuple[str, str]]:
    return [(name, version(name)) for name in ("torch", "torch-npu")]


if __name__ == "__main__":
    sys.exit(main())
