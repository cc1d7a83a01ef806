"""All cases of a profile: specimens crossed with the checks that apply to them, and the checks of the whole driver."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from deepinfer.accelerator import OpOptions, Repeatability, all_op_names
from deepinfer.errors import ArgumentError
from deepinfer_conformance.case import PROFILES, Case, Law, Profile, Specimen, case_id
from deepinfer_conformance.cases import all_specimens
from deepinfer_conformance.cases.axes import BF16, F32, KV
from deepinfer_conformance.checks import (
    composition,
    device,
    invariance,
    numerics,
    ranks,
    relocation,
    step_invariance,
    streams,
)
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.stored import load_call
from deepinfer_conformance.data.worlds import World
from deepinfer_conformance.outcomes import Level

_DEVICE_CHECKS: Final[Mapping[str, Law]] = {
    "identity": device.identity,
    "claims": device.claims,
    "memory": device.memory,
    "allocation": device.allocation,
    "unclaimed": device.unclaimed,
    "determinism": device.determinism,
}
_ROW_CHECKS: Final[Mapping[str, Law]] = {
    "batch_size": invariance.batch_size,
    "row_order": invariance.row_order,
    "neighbours": invariance.neighbours,
    "strides": invariance.strides,
    "threads": invariance.threads,
}
_STEP_CHECKS: Final[Mapping[str, Law]] = {
    "company": step_invariance.company,
    "placement": step_invariance.placement,
    "chunking": step_invariance.chunking,
    "rows_at_once": step_invariance.rows_at_once,
    "step_threads": step_invariance.step_threads,
}
_PREPARES: Final = ("linear.prepare", "linear.prepare_grouped", "experts.prepare", "experts.prepare_shared")
_STORED: Final = ("mxfp4", "fp8", "bfloat16")
"""Specimens of routed experts, one a stored format."""
_FUSED: Final = ("experts.local", "sampling.sample")
_REFUSED_OPTIONS: Final = OpOptions(activation_dtype=torch.float16)
_RANKS: Final = (2, 3, 4)


def catalogue(seed: int = 0, profile: Profile = "quick") -> tuple[Case, ...]:
    """Return the cases of a profile in the order in which they run."""
    cases = [*_device(seed), *_ops(seed), *_steps(seed), *_ranks(seed), *_whole_model(seed)]
    kept = [case for case in cases if profile == "full" or case.profile == "quick"]
    return tuple(sorted(kept, key=lambda case: case.level))


def checks() -> tuple[str, ...]:
    """Return "LEVEL/check" of every check there is."""
    return tuple(dict.fromkeys(f"{case.level.name}/{case.check}" for case in catalogue(0, "full")))


def chosen(
    cases: Iterable[Case], *, level: Level | None = None, ops: Sequence[str] = (), ids: Sequence[str] = ()
) -> tuple[Case, ...]:
    """Return the cases up to a level, of ops that match any glob, or whose ids match any glob.

    Raises:
        ArgumentError: a glob matches nothing, with what comes close.
    """
    listed = tuple(cases)
    problems = [_no_such_op(glob) for glob in ops if not fnmatch.filter(all_op_names(), glob)]
    problems += [_no_such_case(glob, listed) for glob in ids if not fnmatch.filter([case.id for case in listed], glob)]
    if problems:
        raise ArgumentError("choice of cases", problems)
    return tuple(
        case
        for case in listed
        if (level is None or case.level <= level)
        and (not ops or any(case.op and fnmatch.fnmatchcase(case.op, glob) for glob in ops))
        and (not ids or any(fnmatch.fnmatchcase(case.id, glob) for glob in ids))
    )


def captured_case(path: Path) -> Case:
    """Return the case of a captured call: its inputs are the file's, its law is numerics.

    Raises:
        ArgumentError: the file is no captured call, or of an op that this contract does not have.
    """
    call, options = load_call(path)
    if call.op not in all_op_names():
        raise ArgumentError(str(path), [_no_such_op(call.op)])
    return Case(
        id=str(path),
        level=Level.L1,
        check="captured",
        op=call.op,
        options=options,
        seed=0,
        law=numerics.prepared if call.op in _PREPARES else numerics.numerics,
        build=partial(_loaded, path),
    )


def _loaded(path: Path) -> OpCall:
    call, _ = load_call(path)
    return call


def parse_profile(name: str) -> Profile:
    """Return the profile of that name, or raise ArgumentError."""
    for profile in PROFILES:
        if name == profile:
            return profile
    raise ArgumentError("profile", [f"{name!r} is no profile; choose one of {', '.join(PROFILES)}"])


def parse_level(name: str) -> Level:
    """Return the level of that name, or raise ArgumentError."""
    if name in Level.__members__:
        return Level[name]
    raise ArgumentError("level", [f"{name!r} is no level; choose one of {', '.join(Level.__members__)}"])


def _device(seed: int) -> Iterator[Case]:
    for check, law in _DEVICE_CHECKS.items():
        yield Case(case_id(Level.L0, "", check, ""), Level.L0, check, "", F32, seed, law)
    yield Case(case_id(Level.L4, "", "order", "two_streams"), Level.L4, "order", "", F32, seed, streams.order)


def _ops(seed: int) -> Iterator[Case]:
    seen: set[str] = set()
    for specimen in all_specimens(seed):
        is_first = specimen.op not in seen
        is_prepare = specimen.op in _PREPARES
        law = numerics.prepared if is_prepare else numerics.numerics
        check = "prepared" if is_prepare else "numerics"
        yield from _cases(specimen, Level.L1, check, law, seed, specimen.options)
        if is_first and not specimen.full:
            seen.add(specimen.op)
            yield from _cases(specimen, Level.L1, "refusal", numerics.refusal, seed, (_REFUSED_OPTIONS,))
        if is_prepare:
            continue
        if specimen.op == "experts.routed" and specimen.name in _STORED:
            yield from _cases(
                specimen, Level.L1, "moved", relocation.moved, seed, specimen.options[:2], Repeatability.RUN_TO_RUN
            )
        if _is_representative(specimen):
            yield from _cases(specimen, Level.L1, "read_only", numerics.read_only, seed, specimen.options[:1])
            yield from _cases(specimen, Level.L1, "unwritten", numerics.unwritten, seed, specimen.options[:1])
            yield from _cases(
                specimen,
                Level.L2,
                "repetition",
                invariance.repetition,
                seed,
                specimen.options[:2],
                Repeatability.RUN_TO_RUN,
            )
        if specimen.by_rows:
            yield from _invariance(specimen, seed)


def _invariance(specimen: Specimen, seed: int) -> Iterator[Case]:
    for check, law in _ROW_CHECKS.items():
        yield from _cases(specimen, Level.L2, check, law, seed, specimen.options, Repeatability.BATCH_INVARIANT)
    if specimen.op in _FUSED:
        yield from _cases(
            specimen, Level.L2, "parts", composition.parts, seed, specimen.options, Repeatability.BATCH_INVARIANT
        )
    yield from _cases(specimen, Level.L4, "graph", streams.graph_against_eager, seed, specimen.options[:1])


def _is_representative(specimen: Specimen) -> bool:
    """One or two specimens of an op are enough where a check asks about its habits, not its numbers."""
    return not specimen.full and specimen.name in (
        "fp8", "middle", "17_rows", "7_rows_of_float32", "flat", "window_normal", "9_rows_over_records",
        "repeated_slots", "engram_fp8_9_rows", "mxfp4", "9_rows", "plain", "everything", "64_rows", "600_tokens",
        "middle_ratio_2", "4_items", "cuts_through_pairs",
    )  # fmt: skip


def _cases(
    specimen: Specimen,
    level: Level,
    check: str,
    law: Law,
    seed: int,
    options: Sequence[OpOptions],
    needs: Repeatability = Repeatability.NONE,
) -> Iterator[Case]:
    for each in options:
        yield Case(
            id=case_id(level, specimen.op, check, specimen.name, each),
            level=level,
            check=check,
            op=specimen.op,
            options=each,
            seed=seed,
            law=law,
            build=partial(specimen.build, each),
            needs=needs,
            extents=specimen.extents,
            profile="full" if specimen.full else "quick",
            facts={"exact": specimen.exact},
        )


def _steps(seed: int) -> Iterator[Case]:
    for op in step_invariance.CALLS:
        for options in (F32, BF16) if op == "compression.pool_pairs" else KV:
            for check, law in _STEP_CHECKS.items():
                make = partial(_world, seed, op, options)
                yield Case(
                    id=case_id(Level.L2, op, check, "three_requests", options),
                    level=Level.L2,
                    check=check,
                    op=op,
                    options=options,
                    seed=seed,
                    law=law,
                    build=partial(_together, make, op),
                    needs=Repeatability.BATCH_INVARIANT,
                    facts={"world": make},
                )


def _world(seed: int, op: str, options: OpOptions) -> World:
    return World(Draws(seed, f"{op}/steps"), options)


def _together(make: partial[World], op: str) -> OpCall:
    return step_invariance.CALLS[op](make().lay(step_invariance.TOGETHER))


def _ranks(seed: int) -> Iterator[Case]:
    for check, law in ranks.LAWS.items():
        for world in (3,) if check in ranks.MISSING else _RANKS:
            name = f"{world}_ranks"
            yield Case(
                case_id(Level.L3, "", check, name),
                Level.L3,
                check,
                "",
                F32,
                seed,
                law,
                timeout_s=120.0,
                facts={"ranks": world},
            )


def _whole_model(seed: int) -> Iterator[Case]:
    from deepinfer_conformance.end_to_end import cases

    yield from cases(seed)


def _no_such_op(glob: str) -> str:
    close = difflib.get_close_matches(glob, all_op_names(), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"ops: {', '.join(all_op_names())}"
    return f"{glob!r} matches no op of the contract; {hint}"


def _no_such_case(glob: str, cases: Sequence[Case]) -> str:
    close = difflib.get_close_matches(glob, [case.id for case in cases], n=3, cutoff=0.4)
    hint = f"close: {', '.join(close)}" if close else "see `deepinfer conformance list`"
    return f"{glob!r} matches no case; {hint}"
