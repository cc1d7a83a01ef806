"""L2: a row's bits depend on nothing but the row. No tolerance.

Every law runs the same rows in two surroundings and compares bits. Options ask for ``batch_invariant``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from deepinfer.accelerator import OpOptions
from deepinfer_conformance.bench import Bench, Effects
from deepinfer_conformance.case import Case
from deepinfer_conformance.checks.comparison import bit_finding
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.layouts import pitched, turned
from deepinfer_conformance.data.row_views import changed_rows, row_count, with_rows
from deepinfer_conformance.outcomes import Finding

BATCHES = (1, 2, 3, 7, 8, 9, 16, 17, 33)
THREADS = (1, 2, 3)
GARBAGE = (float("nan"), float("inf"), 1e38, -1e-40)


def invariant(options: OpOptions) -> OpOptions:
    """Return the options that ask for R2."""
    return dataclasses.replace(options, batch_invariant=True)


def batch_size(bench: Bench, case: Case) -> Sequence[Finding]:
    """Rows in batches of 1 to 33, repeated where there are not enough, against the whole batch."""
    run = _Runs(bench, case)
    findings = []
    for size in BATCHES:
        rows = torch.arange(size) % run.count
        findings += run.compared(with_rows(run.call, rows), rows, f"in a batch of {size}: ")
    last = torch.tensor([run.count - 1])
    return [*findings, *run.compared(with_rows(run.call, last), last, "alone: ")]


def row_order(bench: Bench, case: Case) -> Sequence[Finding]:
    """Rows reversed, and every second one first."""
    run = _Runs(bench, case)
    backwards = torch.arange(run.count - 1, -1, -1)
    riffled = torch.cat([torch.arange(1, run.count, 2), torch.arange(0, run.count, 2)])
    return [
        *run.compared(with_rows(run.call, backwards), backwards, "in reverse order: "),
        *run.compared(with_rows(run.call, riffled), riffled, "in another order: "),
    ]


def neighbours(bench: Bench, case: Case) -> Sequence[Finding]:
    """Every second row becomes NaN, infinity, huge or denormal; the others must not notice."""
    run = _Runs(bench, case)
    findings = []
    for garbage in GARBAGE:
        for kept in (0, 1):
            rows = torch.arange(kept, run.count, 2)
            spoilt = torch.arange(1 - kept, run.count, 2)

            def spoil(tensor: torch.Tensor, spoilt: torch.Tensor = spoilt, garbage: float = garbage) -> torch.Tensor:
                return tensor.index_fill(0, spoilt, garbage) if tensor.dtype.is_floating_point else tensor

            findings += run.compared(changed_rows(run.call, spoil), rows, f"beside rows of {garbage}: ", among=rows)
    return findings


def strides(bench: Bench, case: Case) -> Sequence[Finding]:
    """The same values in a pitched tensor, and in column-major order."""
    run = _Runs(bench, case)
    rows = torch.arange(run.count)

    def pitch(tensor: torch.Tensor) -> torch.Tensor:
        return pitched(tensor, float("nan")) if tensor.dtype.is_floating_point and tensor.dim() > 1 else tensor

    def turn(tensor: torch.Tensor) -> torch.Tensor:
        return turned(tensor) if tensor.dtype.is_floating_point else tensor

    return [
        *run.compared(changed_rows(run.call, pitch), rows, "from a pitched tensor: "),
        *run.compared(changed_rows(run.call, turn), rows, "from a column-major tensor: "),
    ]


def threads(bench: Bench, case: Case) -> Sequence[Finding]:
    """One host thread against several, where the device is the host; elsewhere a repetition."""
    run = _Runs(bench, case)
    rows = torch.arange(run.count)
    findings = []
    for count in THREADS:
        with host_threads(count):
            findings += run.compared(run.call, rows, f"with {count} threads: ")
    return findings


def repetition(bench: Bench, case: Case) -> Sequence[Finding]:
    """R1: the same call twice, without asking for batch invariance."""
    call = bench.prepared(case.inputs(), case.options)
    first, second = bench.run(call, case.options), bench.run(call, case.options)
    return [bit_finding(part, second[part], first[part], "the second time ") for part in first]


@contextmanager
def host_threads(count: int) -> Iterator[None]:
    """Run with another number of torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Runs:
    """The whole batch's results, and comparisons of other runs with them."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self._bench = bench
        self._options = invariant(case.options)
        self.call = bench.prepared(case.inputs(), self._options)
        self.count = row_count(self.call)
        self._whole = self._run(self.call)

    def compared(
        self, call: OpCall, rows: torch.Tensor, where: str, *, among: torch.Tensor | None = None
    ) -> list[Finding]:
        """Compare the rows of a run (or those of its rows ``among``) with rows of the whole batch; worst part only."""
        got = self._run(call)
        findings = []
        for part, whole in self._whole.items():
            mine = got[part] if among is None else got[part].index_select(0, among)
            findings.append(bit_finding(part, mine, whole.index_select(0, rows), where))
        return findings

    def _run(self, call: OpCall) -> Effects:
        return self._bench.run(call, self._options)
