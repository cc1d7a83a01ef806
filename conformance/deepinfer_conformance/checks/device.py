# ruff: noqa: ARG001 - all laws share one signature
"""L0: the driver as a device: what it says of itself, memory, allocation, and refusal of what it does not claim."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.accelerator import (
    INTERFACE_VERSION,
    OP_GROUPS,
    AcceleratorDriver,
    LinearShape,
    OpOptions,
    RankPlace,
    Repeatability,
    all_op_names,
)
from deepinfer.errors import DeterminismError, OpRefusedError
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.outcomes import Finding

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (7,), (3, 0, 2), (5, 33), (2, 3, 4, 5))
NOWHERE = "127.0.0.1:1"
PROVED_SHAPES = (LinearShape(64, 96, torch.float32), LinearShape(96, 24, torch.bfloat16))


def identity(bench: Bench, case: Case) -> Sequence[Finding]:
    """Name, version, interface version and availability are told, and the driver says that it can run here."""
    driver, problems = bench.driver, []
    availability = type(driver).availability()
    if not availability.available:
        problems += [f"unavailable: {reason.problem}" for reason in availability.reasons]
    if not availability.device_name:
        problems.append("availability().device_name is empty")
    if not driver.version or driver.version == "0":
        problems.append("version is not told")
    major, minor = driver.interface_version
    if major != INTERFACE_VERSION[0] or minor > INTERFACE_VERSION[1]:
        problems.append(f"interface_version {driver.interface_version} does not load in {INTERFACE_VERSION}")
    device: object = driver.device
    if not isinstance(device, torch.device):
        problems.append(f"device is {device!r}, not a torch.device")
    return _problems(problems)


def claims(bench: Bench, case: Case) -> Sequence[Finding]:
    """Every claim has an implementation, every implementation a claim, and both are the same each time."""
    driver, known = bench.driver, set(all_op_names())
    first, second = driver.capabilities(), driver.capabilities()
    problems = [f"{op!r} is claimed and is no op of the contract" for op in sorted(set(first.ops) - known)]
    problems += [f"{op!r} is a declared fallback and no op" for op in sorted(set(first.declared_fallbacks) - known)]
    if first != second:
        problems.append("capabilities() returns something else the second time")
    both = sorted(set(first.ops) & set(first.declared_fallbacks))
    problems += [f"{op!r} is claimed and a declared fallback at once" for op in both]
    groups = driver.op_groups(_claimed_options(driver))
    for group_type in OP_GROUPS:
        group = groups.get(group_type.group)
        if group is not None and not isinstance(group, group_type):
            problems.append(f"group {group_type.group!r} is a {type(group).__qualname__}, not a {group_type.__name__}")
            continue
        implemented = type(group).implemented() if group is not None else ()
        for name in group_type.op_names():
            op = f"{group_type.group}.{name}"
            if op in first.ops and name not in implemented:
                problems.append(f"{op!r} is claimed and not implemented")
            if op not in first.ops and name in implemented and op not in first.declared_fallbacks:
                problems.append(f"{op!r} is implemented and not claimed")
    problems += [f"group {name!r} is unknown" for name in sorted(set(groups) - {group.group for group in OP_GROUPS})]
    return _problems(problems)


def memory(bench: Bench, case: Case) -> Sequence[Finding]:
    """Memory is a plausible number of bytes: 0 <= free <= total, and room for a cache."""
    info, problems = bench.driver.memory(), []
    if not 0 <= info.free_bytes <= info.total_bytes:
        problems.append(f"free {info.free_bytes} of total {info.total_bytes} bytes")
    if info.total_bytes < 2**20:
        problems.append(f"total is {info.total_bytes} bytes")
    if not 0 <= info.reserved_bytes <= info.total_bytes:
        problems.append(f"reserved {info.reserved_bytes} of total {info.total_bytes} bytes")
    return _problems(problems)


def allocation(bench: Bench, case: Case) -> Sequence[Finding]:
    """Shapes, dtypes and device are as asked; tensors are dense, writable, and never share memory."""
    driver, problems = bench.driver, []
    held: list[tuple[torch.Tensor, int]] = []
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = driver.allocate(shape, dtype)
            what = f"allocate({shape}, {dtype})"
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                problems.append(f"{what} gave {tensor.dtype} {tuple(tensor.shape)}")
            if tensor.device.type != driver.device.type:
                problems.append(f"{what} lies on {tensor.device}, not {driver.device}")
            if not tensor.is_contiguous():
                problems.append(f"{what} is not contiguous")
            mark = len(held) % 2 if dtype == torch.bool else len(held) % 100
            held.append((tensor.fill_(mark), mark))
    driver.synchronize()
    overwritten = [index for index, (tensor, mark) in enumerate(held) if not bool((tensor == mark).all())]
    if overwritten:
        problems.append(f"{len(overwritten)} of {len(held)} allocations share memory with another")
    return _problems(problems)


def unclaimed(bench: Bench, case: Case) -> Sequence[Finding]:
    """Graphs, ranks and repeatability levels that are not claimed are refused by their typed errors."""
    driver, problems = bench.driver, []
    said = driver.capabilities()
    if not said.graphs:
        problems += _unless_refused("new_graph()", driver.new_graph)
    if not said.collectives:
        problems += _unless_refused("collectives(2)", lambda: driver.collectives(2))
        problems += _unless_refused("join_group of 2 ranks", lambda: driver.join_group(RankPlace(0, 2, NOWHERE, 1.0)))
    if driver.collectives(1).world_size != 1:
        problems.append("collectives(1) is no group of one rank")
    if driver.join_group(RankPlace(0, 1, NOWHERE)).world_size != 1:
        problems.append("join_group of one rank is no group of one rank")
    try:
        driver.set_determinism(Repeatability.SPECULATION_INVARIANT, PROVED_SHAPES)
        if min((claim.repeatability for claim in said.ops.values()), default=0) < Repeatability.SPECULATION_INVARIANT:
            problems.append("set_determinism(R4) accepts a level that ops do not claim")
    except DeterminismError:
        pass
    return _problems(problems)


def determinism(bench: Bench, case: Case) -> Sequence[Finding]:
    """What every op claims is proved on this machine, and the proof leaves the process as it was."""
    driver, problems = bench.driver, []
    level = min((claim.repeatability for claim in driver.capabilities().ops.values()), default=Repeatability.NONE)
    provable = min(level, Repeatability.BATCH_INVARIANT)
    threads = torch.get_num_threads()
    driver.set_determinism(Repeatability.NONE, ())
    if provable >= Repeatability.BATCH_INVARIANT:
        try:
            driver.set_determinism(Repeatability(provable), PROVED_SHAPES)
        except DeterminismError as error:
            problems.append(f"every op claims R{int(level)}, and set_determinism(R{int(provable)}) refuses: {error}")
    if torch.get_num_threads() != threads:
        problems.append(f"the proof changed the number of threads from {threads} to {torch.get_num_threads()}")
    return _problems(problems)


def _claimed_options(driver: AcceleratorDriver) -> OpOptions:
    """Return options that the driver's first claim allows."""
    for claim in driver.capabilities().ops.values():
        return OpOptions(
            activation_dtype=min(claim.dtypes, key=str),
            numerics="portable" if "portable" in claim.numerics else "served",
            kv_cache_dtype="released" if "released" in claim.kv_formats else "float32",
        )
    return OpOptions()


def _unless_refused(what: str, call: object) -> list[str]:
    if not callable(call):
        raise TypeError(f"{what} is not callable")
    try:
        call()
    except OpRefusedError:
        return []
    return [f"{what} is not claimed and is not refused"]


def _problems(problems: list[str]) -> list[Finding]:
    return [Finding("problems", float(len(problems)), 0.0, "; ".join(problems))]
