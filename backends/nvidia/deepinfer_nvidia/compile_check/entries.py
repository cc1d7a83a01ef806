"""What came out of compilations, and which limits it breaks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deepinfer_nvidia.architecture import SHARED_BYTES, TENSOR_MEMORY_COLUMNS, Architecture
from deepinfer_nvidia.compile_check.allowlist import Allowed
from deepinfer_nvidia.compile_check.expectations import expectation_of, problems
from deepinfer_triton.configuration import Configuration

SPILL_GATE: Final = "3.9.0"
"""Spills belong to a release of Triton: the gate is on one, other releases only report them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled form of a kernel for one architecture.

    Attributes:
        kernel: name of the kernel function.
        config: what distinguishes the form.
        arch: name of the target.
        registers: a thread.
        spill_bytes: a thread.
        shared_bytes: a block.
        tensor_memory_columns: a block.
        instructions: matrix instructions, by opcode of the binary.
        broken: the limits that it breaks, one sentence each.
    """

    kernel: str
    config: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_memory_columns: int
    instructions: Mapping[str, int]
    broken: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "kernel": self.kernel,
            "config": self.config,
            "arch": self.arch,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "shared_bytes": self.shared_bytes,
            "tensor_memory_columns": self.tensor_memory_columns,
            "instructions": dict(self.instructions),
        }


def entry_of(
    configuration: Configuration, chip: Architecture, compiled: Any, allowed: Sequence[Allowed], *, gates_spills: bool
) -> Entry:
    """Return the entry of what a kit's compilation gave; a failure has no figures and one broken limit."""
    name, label = configuration.name, configuration.label
    if not hasattr(compiled, "registers"):
        first = str(compiled.message).splitlines()
        return Entry(name, label, chip.name, 0, 0, 0, 0, {}, (f"does not compile: {' '.join(first)[:400]}",))
    broken = []
    if compiled.shared_bytes > SHARED_BYTES:
        broken.append(f"{compiled.shared_bytes} bytes of shared memory, at most {SHARED_BYTES}")
    if compiled.tensor_memory_columns > TENSOR_MEMORY_COLUMNS:
        broken.append(f"{compiled.tensor_memory_columns} columns of tensor memory, at most {TENSOR_MEMORY_COLUMNS}")
    most = max((each.spill_bytes for each in allowed if each.covers(name, label, chip.name)), default=0)
    if gates_spills and compiled.spill_bytes > most:
        broken.append(f"spills {compiled.spill_bytes} bytes a thread, at most {most}")
    expected = expectation_of(configuration, chip.target)
    if expected is not None:
        broken += problems(expected, compiled.matrix_instructions, compiled.ptx_instructions)
    return Entry(
        name,
        label,
        chip.name,
        compiled.registers,
        compiled.spill_bytes,
        compiled.shared_bytes,
        compiled.tensor_memory_columns,
        dict(compiled.matrix_instructions),
        tuple(broken),
    )


def unused(allowed: Iterable[Allowed], entries: Sequence[Entry]) -> list[str]:
    """Return the exceptions that nothing needs, so that none outlives its kernel."""
    return [
        f"the exception for {each.kernel} {each.config!r} on {each.arch} is needed by nothing; remove it"
        for each in allowed
        if any(entry.arch == each.arch for entry in entries)
        and not any(each.covers(entry.kernel, entry.config, entry.arch) and entry.spill_bytes for entry in entries)
    ]


def markdown(entries: Sequence[Entry], triton: str) -> str:
    """Return the page that the check writes: a line per kernel and target, then every form."""
    head = [
        "# Compiled forms of the NVIDIA driver's kernels",
        "",
        "Written by `python -m deepinfer_nvidia.compile_check --markdown backends/nvidia/COMPILED.md`; do not edit. "
        f"Figures are of triton {triton}, made without a GPU: nothing here has run.",
        "",
        "## Kernels",
        "",
        "| kernel | arch | forms | registers | spills (bytes) | shared (bytes) | tensor memory | instructions |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.kernel, entry.arch), []).append(entry)
    rows = [
        f"| `{kernel}` | {arch} | {len(found)} | {_span(each.registers for each in found)} "
        f"| {_span(each.spill_bytes for each in found)} | {_span(each.shared_bytes for each in found)} "
        f"| {_span(each.tensor_memory_columns for each in found)} "
        f"| {', '.join(sorted({name for each in found for name in each.instructions})) or '-'} |"
        for (kernel, arch), found in groups.items()
    ]
    forms = [
        "",
        "## Forms",
        "",
        "| kernel | form | arch | registers | spills | shared | tensor memory | instructions |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    forms += [
        f"| `{each.kernel}` | {each.config} | {each.arch} | {each.registers} | {each.spill_bytes} "
        f"| {each.shared_bytes} | {each.tensor_memory_columns} "
        f"| {', '.join(f'{name} x{count}' for name, count in each.instructions.items()) or '-'} |"
        for each in entries
    ]
    return "\n".join([*head, *rows, *forms]) + "\n"


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
