"""L2 of the paged ops: the same requests in other company, other places, other cuts. No tolerance.

Legend: T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer.accelerator import StepKind
from deepinfer.accelerator.ops.selection import SelectionRule
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.case import Case
from deepinfer_conformance.checks.comparison import bit_finding
from deepinfer_conformance.checks.invariance import host_threads, invariant
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.worlds import Chunk, Laid, Placement, World
from deepinfer_conformance.outcomes import Finding

CALLS: dict[str, Callable[[Laid], OpCall]] = {
    "attention.sparse": lambda laid: laid.attention(),
    "selection.top_entries": lambda laid: laid.selection(SelectionRule(5, 3, 4)),
    "compression.pool_pairs": lambda laid: laid.pooling(),
}
TOGETHER = (Chunk(2, 7, 4), Chunk(0, 16, 9), Chunk(1, 15, 5))
DECODED = (Chunk(1, 17, 4), Chunk(0, 8, 3), Chunk(2, 29, 2))
Rows = dict[tuple[int, int], dict[str, torch.Tensor]]


def company(bench: Bench, case: Case) -> Sequence[Finding]:
    """Each request alone against all together, and all in another order."""
    stage = _Stage(bench, case)
    whole = stage.rows(TOGETHER)
    findings = []
    for chunk in TOGETHER:
        findings += stage.compared(stage.rows([chunk]), whole, f"request {chunk.request} alone: ")
    return [*findings, *stage.compared(stage.rows(TOGETHER[::-1]), whole, "in reverse order: ")]


def placement(bench: Bench, case: Case) -> Sequence[Finding]:
    """Other blocks and slots, other bytes in all memory that the requests do not own, and padding rows."""
    stage = _Stage(bench, case)
    whole = stage.rows(TOGETHER)
    findings = []
    for place, where in (
        (Placement(seed=7), "in other blocks: "),
        (Placement(poison=3), "beside random bytes: "),
        (Placement(seed=9, poison=4), "in other blocks beside random bytes: "),
        (Placement(padding=3), "with padding rows: "),
    ):
        findings += stage.compared(stage.rows(TOGETHER, place=place), whole, where)
    return findings


def chunking(bench: Bench, case: Case) -> Sequence[Finding]:
    """A chunk cut in two at every place, and row by row."""
    stage = _Stage(bench, case)
    chunk = TOGETHER[1]
    whole = stage.rows([chunk])
    findings = []
    for cut in range(1, chunk.rows):
        halves = (Chunk(chunk.request, chunk.cached, cut), Chunk(chunk.request, chunk.cached + cut, chunk.rows - cut))
        cut_rows = {**stage.rows([halves[0]]), **stage.rows([halves[1]])}
        findings += stage.compared(cut_rows, whole, f"cut after {cut} rows: ")
    single: Rows = {}
    for one in _one_by_one(chunk):
        single |= stage.rows([one])
    return [*findings, *stage.compared(single, whole, "row by row: ")]


def rows_at_once(bench: Bench, case: Case) -> Sequence[Finding]:
    """Several rows of a request in one decode step against one row a step, and against a prefill chunk."""
    stage = _Stage(bench, case)
    whole = stage.rows(DECODED, kind="decode")
    findings = stage.compared(stage.rows(DECODED), whole, "as a prefill chunk: ")
    single: Rows = {}
    for chunk in DECODED:
        for one in _one_by_one(chunk):
            single |= stage.rows([one], kind="decode")
    return [*findings, *stage.compared(single, whole, "one row a step: ")]


def step_threads(bench: Bench, case: Case) -> Sequence[Finding]:
    """One host thread against several."""
    stage = _Stage(bench, case)
    with host_threads(1):
        whole = stage.rows(TOGETHER)
    findings = []
    for count in (2, 3):
        with host_threads(count):
            findings += stage.compared(stage.rows(TOGETHER), whole, f"with {count} threads: ")
    return findings


def _one_by_one(chunk: Chunk) -> list[Chunk]:
    return [Chunk(chunk.request, chunk.cached + row, 1) for row in range(chunk.rows)]


class _Stage:
    """Runs steps of one world and names each row's results by request and position."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self._bench = bench
        self._options = invariant(case.options)
        make: Any = case.facts["world"]
        self._world: World = make()
        self._call = CALLS[case.op]

    def rows(self, chunks: Sequence[Chunk], *, kind: StepKind = "prefill", place: Placement | None = None) -> Rows:
        laid = self._world.lay(chunks, kind, place)
        found = self._bench.run(self._call(laid), self._options)
        rows: Rows = {
            row: {part: tensor[number] for part, tensor in found.items() if part.startswith("result")}
            for number, row in enumerate(laid.rows)
        }
        pending = found.get("argument.pending.rows_ZPW")
        if pending is not None:
            for chunk in chunks:
                # Compared under the last position of the chunk: what waits after the step.
                last = (chunk.request, chunk.cached + chunk.rows - 1)
                rows[last] = {**rows[last], "waiting rows": laid.waiting_rows(pending, chunk)}
        return rows

    def compared(self, got: Rows, whole: Rows, where: str) -> list[Finding]:
        """Compare row by row; what only one side has (rows that wait after an inner cut) is passed over."""
        findings = []
        for row, parts in got.items():
            for part, tensor in parts.items():
                if part in whole[row]:
                    place = f"{where}request {row[0]}, position {row[1]}: "
                    findings.append(bit_finding(part, tensor, whole[row][part], place))
        return [finding for finding in findings if not finding.holds] or findings[:1]
