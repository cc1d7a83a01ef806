"""Runs the tools over the kernels: side by side, each form of code once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from deepinfer_ascend.capabilities import NATIVE
from deepinfer_ascend.lowering_check.kernels import Candidate, ttir_of
from deepinfer_ascend.lowering_check.report import Entry
from deepinfer_ascend.lowering_check.tools import LoweringError, Tools
from deepinfer_ascend.providers import NOT_LOWERED, NOT_TAKEN, TRITON_CLASSES

Outcome = tuple[float, str]
"""Seconds, and the reason of a failure."""


def check(tools: Tools, found: Sequence[Candidate], chips: Sequence[str]) -> Iterator[Entry]:
    """Yield an entry for each candidate, op and chip."""
    codes = [_code(candidate) for candidate in found]
    # Configurations that differ only in warps are one code here.
    distinct = list(dict.fromkeys(code for code, problem in codes if not problem))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = dict(zip(distinct, pool.map(lambda code: _lowered(tools, code, chips), distinct), strict=True))
    for candidate, (code, problem) in zip(found, codes, strict=True):
        by_chip = dict.fromkeys(chips, (0.0, problem)) if problem else outcomes[code]
        for soc, (seconds, reason) in by_chip.items():
            for op in candidate.ops:
                yield Entry(
                    op,
                    soc,
                    "lowered",
                    "failed" if reason else "ok",
                    candidate.kernel,
                    candidate.label,
                    round(seconds, 2),
                    reason,
                    is_taken(op, candidate.kernel),
                )


def is_taken(op: str, kernel: str) -> bool:
    """Return whether the driver may take a Triton kernel for ``op``, the name of an op or of a whole group."""
    is_kernels_op = op.partition(".")[0] in TRITON_CLASSES and op not in NOT_TAKEN
    return is_kernels_op and op not in NATIVE and kernel not in NOT_LOWERED


def _code(candidate: Candidate) -> tuple[str, str]:
    try:
        return ttir_of(candidate), ""
    except Exception as error:  # noqa: BLE001 (whatever Triton raises is this kernel's result)
        return "", f"Triton does not compile it: {type(error).__name__}: {str(error).strip()[-400:]}"


def _lowered(tools: Tools, code: str, chips: Sequence[str]) -> dict[str, Outcome]:
    started = time.perf_counter()
    try:
        linalg = tools.to_linalg(code)
    except LoweringError as error:
        return dict.fromkeys(chips, (time.perf_counter() - started, str(error)))
    outcomes: dict[str, Outcome] = {}
    for soc in chips:
        started = time.perf_counter()
        try:
            tools.to_hivm(linalg, soc)
            reason = ""
        except LoweringError as error:
            reason = str(error)
        outcomes[soc] = (time.perf_counter() - started, reason)
    return outcomes
