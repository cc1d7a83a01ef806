"""What came out of a compilation, and the limits that it must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepinfer_conformance.triton_cpu.errors import KernelLimitError

# SASS opcodes of the matrix units, and what they are.
MATRIX_INSTRUCTIONS: Mapping[str, str] = {
    "UTCHMMA": "tcgen05.mma kind::f16 or tf32",
    "UTCQMMA": "tcgen05.mma kind::f8f6f4 or mxf8f6f4",
    "UTCOMMA": "tcgen05.mma kind::mxf4 or mxf4nvf4",
    "UTCIMMA": "tcgen05.mma kind::i8",
    "HGMMA": "wgmma on 16-bit floats or tf32",
    "QGMMA": "wgmma on 8-bit floats",
    "IGMMA": "wgmma on integers",
    "HMMA": "mma.sync on 16-bit floats or tf32, the old path",
    "QMMA": "mma.sync on 8-bit floats, the old path",
    "OMMA": "mma.sync on 4-bit floats, the old path",
    "IMMA": "mma.sync on integers, the old path",
    "DMMA": "mma.sync on float64",
}
# Data movement worth knowing about: bulk and asynchronous copies, tensor memory, spills, atomics.
MEMORY_INSTRUCTIONS = ("UTMALDG", "UTMASTG", "LDGSTS", "LDTM", "STTM", "LDL", "STL", "ATOM", "ATOMG", "RED", "REDG")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel compiled for one GPU; figures belong to this Triton release.

    Attributes:
        registers: per thread.
        stack_bytes: per thread; not zero means spilled registers or local arrays.
        local_bytes: per thread, beyond the stack.
        shared_bytes: static and dynamic, per block.
        tensor_memory_columns: columns of tensor memory; 0 before sm_100a.
        matrix_instructions: SASS opcode to count.
        memory_instructions: SASS opcode to count; ``STL`` and ``LDL`` are spill stores and loads.
        ptx_instructions: matrix instructions as the PTX names them, to count.
        has_sass: whether a disassembler was found; without it both SASS counts are empty.
        ttir: Triton's own intermediate code, before anything that belongs to a vendor.
        compile_s: seconds in the compiler; of the first compilation if it came from the cache.
    """

    label: str
    kernel: str
    arch: int
    triton_version: str
    num_warps: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    tensor_memory_columns: int
    matrix_instructions: Mapping[str, int]
    memory_instructions: Mapping[str, int]
    ptx_instructions: Mapping[str, int]
    has_sass: bool
    ttir: str
    ptx: str
    compile_s: float

    @property
    def spill_bytes(self) -> int:
        """Memory that a thread uses because its registers did not suffice."""
        return self.stack_bytes + self.local_bytes


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """A kernel that did not compile, and the compiler's words."""

    label: str
    message: str


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """What a compiled kernel must keep; the defaults are what sm_90a and sm_100a can load, and no spills.

    Attributes:
        spill_bytes: stack and local bytes of a thread.
        registers: of a thread; ``None``: whatever the hardware allows.
        expected: SASS opcodes that must occur, each (`MATRIX_INSTRUCTIONS` or ``"UTMALDG"`` and its like).
        forbidden: SASS opcodes that must not, for example ``("HMMA",)`` where a fallback would go unnoticed.
    """

    shared_bytes: int = 232_448
    tensor_memory_columns: int = 512
    spill_bytes: int = 0
    registers: int | None = None
    expected: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()


def broken_limits(compiled: CompiledKernel, limits: KernelLimits) -> tuple[str, ...]:
    """Every limit that a compiled kernel breaks, one sentence each."""
    where = f"{compiled.label} [triton {compiled.triton_version}]"
    found = {**compiled.matrix_instructions, **compiled.memory_instructions}
    measures = (
        ("shared memory", compiled.shared_bytes, limits.shared_bytes, "bytes; the driver will not load it"),
        (
            "tensor memory",
            compiled.tensor_memory_columns,
            limits.tensor_memory_columns,
            "columns; the driver will not load it",
        ),
        ("registers", compiled.registers, limits.registers, "a thread"),
    )
    problems = [
        f"{where}: {name} {value}, at most {limit} {unit}"
        for name, value, limit, unit in measures
        if limit is not None and value > limit
    ]
    if compiled.spill_bytes > limits.spill_bytes:
        stores, loads = found.get("STL", 0), found.get("LDL", 0)
        problems.append(
            f"{where}: spills {compiled.spill_bytes} bytes a thread (stack {compiled.stack_bytes}, local "
            f"{compiled.local_bytes}; {stores} stores, {loads} loads), at most {limits.spill_bytes}"
        )
    if not compiled.has_sass and (limits.expected or limits.forbidden):
        return (*problems, f"{where}: instructions cannot be checked, nvdisasm is not in this triton package")
    shown = ", ".join(f"{name} x{count}" for name, count in sorted(found.items())) or "none"
    problems += [
        f"{where}: no {_named(name)}; its matrix and memory instructions: {shown}"
        for name in limits.expected
        if not found.get(name)
    ]
    problems += [f"{where}: {found[name]} {_named(name)}, none allowed" for name in limits.forbidden if found.get(name)]
    return tuple(problems)


def _named(opcode: str) -> str:
    return f"{opcode} ({MATRIX_INSTRUCTIONS[opcode]})" if opcode in MATRIX_INSTRUCTIONS else opcode


def check_kernels(
    results: Sequence[CompiledKernel | CompileFailure], limits: KernelLimits | Sequence[KernelLimits] | None = None
) -> None:
    """Raises `KernelLimitError` with every broken limit of every kernel, and every kernel that did not compile.

    Args:
        results: what `compile_kernels` returned.
        limits: for all, or one for each; default: `KernelLimits()`.
    """
    each = [limits or KernelLimits()] * len(results) if limits is None or isinstance(limits, KernelLimits) else limits
    problems: list[str] = []
    for result, limit in zip(results, each, strict=True):
        if isinstance(result, CompileFailure):
            problems.append(f"{result.label}: does not compile: {result.message}")
        else:
            problems += broken_limits(result, limit)
    if problems:
        raise KernelLimitError(f"{len(results)} compiled kernels", problems)
