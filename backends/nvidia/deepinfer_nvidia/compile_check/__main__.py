"""The command; see the package. Status 0: every form compiles and keeps every limit; 1: those that do not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from deepinfer.errors import DeepInferError
from deepinfer_nvidia.architecture import ARCHITECTURES, Architecture, by_name
from deepinfer_nvidia.compile_check.allowlist import allowed_spills
from deepinfer_nvidia.compile_check.entries import SPILL_GATE, Entry, entry_of, markdown, unused
from deepinfer_nvidia.interpreting import triton_kit
from deepinfer_triton.configuration import Configuration
from deepinfer_triton.registry import configurations
from deepinfer_triton.sizes import MODELS


def check(
    found: Sequence[Configuration], chips: Sequence[Architecture], *, workers: int, cache: Path | None
) -> list[Entry]:
    """Compile every configuration for every architecture, without a GPU, in processes of their own."""
    kit, allowed = triton_kit(), allowed_spills()
    pairs = [(configuration, chip) for chip in chips for configuration in found]
    requests = [
        kit.compile_request(
            configuration.kernel,
            configuration.signature,
            configuration.constants,
            arch=chip.target,
            num_warps=configuration.num_warps,
            num_stages=configuration.num_stages,
            aligned=configuration.aligned,
            label=f"{chip.name} {configuration.name} {configuration.label}",
        )
        for configuration, chip in pairs
    ]
    results = kit.compile_kernels(requests, workers=workers, cache=cache)
    gates_spills = version("triton") == SPILL_GATE
    return [
        entry_of(configuration, chip, result, allowed, gates_spills=gates_spills)
        for (configuration, chip), result in zip(pairs, results, strict=True)
    ]


def report(entries: Sequence[Entry], triton: str) -> dict[str, object]:
    """Return the report with plain values."""
    return {
        "schema": 1,
        "triton": triton,
        "spills_are_gated": triton == SPILL_GATE,
        "entries": [entry.as_json() for entry in entries],
        "broken": broken(entries),
    }


def broken(entries: Sequence[Entry]) -> list[str]:
    """Return every broken limit of every form."""
    return [f"{entry.arch} {entry.kernel} [{entry.config}]: {problem}" for entry in entries for problem in entry.broken]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_nvidia.compile_check")
    names = [chip.name for chip in ARCHITECTURES]
    parser.add_argument("--arch", action="append", choices=names, help="target; may be repeated; unset: all")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write every entry here")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table here")
    models = {sizes.name: sizes for sizes in MODELS}
    parser.add_argument("--model", action="append", choices=list(models), help="sizes; may be repeated; unset: all")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel; may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="compilers side by side")
    parser.add_argument("--cache", type=Path, help="folder in which results are kept between runs")
    chosen = parser.parse_args(arguments)
    chips = [chip for chip in map(by_name, dict.fromkeys(chosen.arch or names)) if chip is not None]
    try:
        listed = configurations(tuple(models[name] for name in dict.fromkeys(chosen.model or models)))
        found = [each for each in listed if not chosen.kernel or each.name in chosen.kernel]
        entries = check(found, chips, workers=chosen.workers, cache=chosen.cache)
        is_whole = not chosen.kernel and not chosen.model
        problems = broken(entries) + (unused(allowed_spills(), entries) if is_whole else [])
    except DeepInferError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 (a command)
        return 1
    triton = version("triton")
    if chosen.report is not None:
        chosen.report.write_text(json.dumps(report(entries, triton), indent=1) + "\n")
    if chosen.markdown is not None:
        chosen.markdown.write_text(markdown(entries, triton))
    for problem in problems:
        print(f"broken: {problem}", file=sys.stderr)  # noqa: T201
    kernels = len({entry.kernel for entry in entries})
    targets = ", ".join(chip.name for chip in chips)
    print(  # noqa: T201
        f"{len(entries)} forms of {kernels} kernels compiled for {targets} with triton {triton}: "
        f"{len(problems)} broken limits"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
