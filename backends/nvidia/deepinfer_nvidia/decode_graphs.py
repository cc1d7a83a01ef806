"""Decode steps as recorded graphs: fixed buffers, one graph a bucket of requests, steps padded to the next bucket.

A graph replays addresses, grids and host integers of its capture. So every tensor of a step's layout lives in a buffer
that is filled before each replay, host integers are the largest that may ever be needed, and rows that a step does not
have are padding: they are invalid, write nothing, choose no expert. Filling waits for nothing.

Legend: T rows, R requests of a step, M requests of a bucket, k rows a request, B blocks of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.interface import Graph
from deepinfer.errors import OpRefusedError

Run = Callable[[StepLayout, Tensor], Tensor]
"""A decode step: layout and token ids [T] in, one result row for each row out, all on the device."""

PADDING_SLOT = 0
"""State slot and block that no request owns."""


def buckets(most: int, interval: int = 8) -> tuple[int, ...]:
    """Return the sizes that are captured: powers of two up to ``interval``, its multiples, and ``most``."""
    small = [1 << power for power in range(interval.bit_length()) if 1 << power <= min(interval, most)]
    return tuple(sorted({*small, *range(interval, most + 1, interval), most}))


@dataclass(frozen=True, slots=True)
class Extents:
    """What is the same for every step of an engine.

    Attributes:
        rows: k, most rows a request.
        table_blocks: B.
        block_size: token positions a block.
        ring: positions of a window ring.
        max_position: positions that a request may ever hold.
    """

    rows: int
    table_blocks: int
    block_size: int
    ring: int
    max_position: int


class StepBuffers:
    """The tensors of a bucket's steps.

    Attributes:
        requests: M.
        ids_T: int64 [M * k], token ids.
        layout: the layout over the buffers; row j of request r stands at ``r * k + j``.
    """

    def __init__(self, requests: int, extents: Extents, device: torch.device) -> None:
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        rows = requests * extents.rows
        self.requests = requests
        self._rows = extents.rows
        self.ids_T = numbers(rows)
        self.layout = StepLayout(
            kind="decode",
            block_size=extents.block_size,
            ring=extents.ring,
            row_starts_R1=torch.arange(requests + 1, device=device) * extents.rows,
            cached_R=numbers(requests),
            state_slots_R=numbers(requests),
            block_table_RB=numbers(requests, extents.table_blocks),
            request_T=torch.arange(rows, device=device) // extents.rows,
            position_T=numbers(rows),
            window_start_R=numbers(requests),
            image_T=torch.zeros(rows, dtype=torch.bool, device=device),
            valid_T=torch.zeros(rows, dtype=torch.bool, device=device),
            max_position=extents.max_position,
            max_rows=extents.rows,
        )

    def load(self, step: StepLayout, ids_T: Tensor) -> Tensor:
        """Fill the buffers with a step and padding; return int64 [T], where each row of the step stands."""
        layout = self.layout
        if step.kind != "decode" or step.requests > self.requests or step.max_rows > self._rows:
            raise OpRefusedError(
                f"a {step.kind} step of {step.requests} requests with up to {step.max_rows} rows does not fit buffers "
                f"for decode steps of {self.requests} requests with {self._rows} rows"
            )
        if step.max_position > layout.max_position or step.block_table_RB.shape[1] > layout.block_table_RB.shape[1]:
            raise OpRefusedError(
                f"a step up to position {step.max_position} with tables of {step.block_table_RB.shape[1]} blocks "
                f"does not fit buffers for {layout.max_position} positions and {layout.block_table_RB.shape[1]} blocks"
            )
        for buffer_R, values_R in (
            (layout.cached_R, step.cached_R),
            (layout.state_slots_R, step.state_slots_R),
            (layout.window_start_R, step.window_start_R),
        ):
            buffer_R.fill_(PADDING_SLOT)
            buffer_R[: step.requests].copy_(values_R)
        layout.block_table_RB.fill_(PADDING_SLOT)
        layout.block_table_RB[: step.requests, : step.block_table_RB.shape[1]].copy_(step.block_table_RB)
        count_T = torch.arange(step.rows, device=step.position_T.device)
        place_T = step.request_T * self._rows + count_T - step.row_starts_R1.index_select(0, step.request_T)
        for buffer_T, values_T in (
            (self.ids_T, ids_T),
            (layout.position_T, step.position_T),
            (layout.image_T, step.image_T),
            (layout.valid_T, step.valid_T),
        ):
            buffer_T.zero_()
            buffer_T.index_copy_(0, place_T, values_T)
        return place_T


class DecodeGraphs:
    """One graph a bucket, captured once, largest first, so that the smaller ones find its memory in the pool."""

    def __init__(
        self,
        run: Run,
        new_graph: Callable[[], Graph],
        sizes: Sequence[int],
        extents: Extents,
        device: torch.device,
    ) -> None:
        """Capture; every kernel runs once before, because a launch that compiles cannot be recorded."""
        self._graphs: dict[int, _Captured] = {}
        for size in sorted(set(sizes), reverse=True):
            buffers = StepBuffers(size, extents, device)
            run(buffers.layout, buffers.ids_T)
            graph = new_graph()
            graph.capture_begin()
            out = run(buffers.layout, buffers.ids_T)
            graph.capture_end()
            self._graphs[size] = _Captured(buffers, graph, out)

    def bucket_of(self, requests: int) -> int:
        """Return the smallest bucket that holds so many requests."""
        fitting = [size for size in self._graphs if size >= requests]
        if not fitting:
            raise OpRefusedError(f"no graph holds {requests} requests; the largest holds {max(self._graphs)}")
        return min(fitting)

    def replay(self, step: StepLayout, ids_T: Tensor) -> Tensor:
        """Run a decode step from its graph; return the result rows of the step's rows, in new memory."""
        captured = self._graphs[self.bucket_of(step.requests)]
        place_T = captured.buffers.load(step, ids_T)
        captured.graph.replay()
        return captured.out.index_select(0, place_T)


@dataclass(frozen=True, slots=True)
class _Captured:
    buffers: StepBuffers
    graph: Graph
    out: Tensor
