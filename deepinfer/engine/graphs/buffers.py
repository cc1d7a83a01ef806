"""The memory that a recorded decode step reads: one place for each input, filled before every replay.

A graph replays the addresses and the host integers of its capture. So every tensor of a step has a buffer, and host
integers are the largest that may ever be needed. The requests of a step and their rows stand at the front. Behind them
stand placeholders: requests of one row each, with block table [0] and state slot 0, whose rows are not valid, so that
they write nothing and choose no expert. Behind those stand requests without rows. Filling waits for nothing.

Legend: S rows of the buffers and as many requests, T rows and R requests of a step, B blocks of a table, G look-back,
F values of a row's n-gram memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.errors import InvariantError

_NOBODYS = 0
"""State slot and block that no request ever owns."""


@dataclass(frozen=True, slots=True)
class StepExtents:
    """What bounds every decode step of an engine.

    Attributes:
        rows_per_request: newest token and drafts.
        table_blocks: B, blocks of the longest table.
        block_size: positions per block.
        ring: positions per window ring.
        max_position: positions that a request may hold.
        look_back: G, ids of a row's look-back, its own included.
    """

    rows_per_request: int
    table_blocks: int
    block_size: int
    ring: int
    max_position: int
    look_back: int


class StepBuffers:
    """The inputs of the steps of one size.

    Attributes:
        size: S.
        ids_S: int64 token ids.
        tokens_SG: int64, the look-back of the n-gram memory.
        memories: what the layers with such a memory read, by layer [S, F].
        layout: the layout over the buffers.
    """

    def __init__(self, size: int, extents: StepExtents, memories: Mapping[int, Tensor], device: torch.device) -> None:
        """Allocate; all rows are padding.

        Args:
            size: S.
            extents: what bounds the steps.
            memories: any rows' memories, for their widths and dtypes.
            device: where the buffers lie.
        """

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.size = size
        self.ids_S = numbers(size)
        self.tokens_SG = torch.full((size, extents.look_back), -1, dtype=torch.int64, device=device)
        self.memories = {layer: rows_TF.new_zeros((size, rows_TF.shape[1])) for layer, rows_TF in memories.items()}
        self._count_S1 = torch.arange(size + 1, device=device)
        self.layout = StepLayout(
            kind="decode",
            block_size=extents.block_size,
            ring=extents.ring,
            row_starts_R1=self._count_S1.clone(),
            cached_R=numbers(size),
            state_slots_R=numbers(size),
            block_table_RB=numbers(size, extents.table_blocks),
            request_T=self._count_S1[:size].clone(),
            position_T=numbers(size),
            window_start_R=numbers(size),
            image_T=torch.zeros(size, dtype=torch.bool, device=device),
            valid_T=torch.zeros(size, dtype=torch.bool, device=device),
            max_position=extents.max_position,
            max_rows=extents.rows_per_request,
        )

    def load(self, ids_T: Tensor, tokens_TG: Tensor, memories: Mapping[int, Tensor], step: StepLayout) -> None:
        """Fill the buffers with a decode step and padding."""
        layout, rows, requests = self.layout, step.rows, step.requests
        blocks = step.block_table_RB.shape[1]
        is_within = rows <= self.size and blocks <= layout.block_table_RB.shape[1]
        if step.kind != "decode" or not is_within or step.max_position > layout.max_position:
            raise InvariantError(
                f"a {step.kind} step of {rows} rows up to position {step.max_position} with tables of {blocks} blocks "
                f"is to run from a graph of {self.size} rows, {layout.max_position} positions and "
                f"{layout.block_table_RB.shape[1]} blocks"
            )
        layout.row_starts_R1[: requests + 1].copy_(step.row_starts_R1)
        # One row for each placeholder, then none.
        layout.row_starts_R1[requests:].copy_((self._count_S1[: self.size + 1 - requests] + rows).clamp(max=self.size))
        layout.request_T[:rows].copy_(step.request_T)
        layout.request_T[rows:].copy_(self._count_S1[: self.size - rows] + requests)
        for buffer, values in (
            (layout.cached_R, step.cached_R),
            (layout.state_slots_R, step.state_slots_R),
            (layout.window_start_R, step.window_start_R),
            (layout.position_T, step.position_T),
            (layout.image_T, step.image_T),
            (layout.valid_T, step.valid_T),
            (self.ids_S, ids_T),
        ):
            _fill(buffer, values, _NOBODYS)
        _fill(layout.block_table_RB, step.block_table_RB, _NOBODYS)
        _fill(self.tokens_SG, tokens_TG, -1)
        for layer, buffer in self.memories.items():
            _fill(buffer, memories[layer], 0)


def _fill(buffer: Tensor, values: Tensor, padding: int) -> None:
    """Put values into the upper left corner of a buffer and padding everywhere else."""
    count = len(values)
    if buffer.dim() == 2 and values.shape[1] < buffer.shape[1]:
        buffer[:count].fill_(padding)
        buffer[:count, : values.shape[1]].copy_(values)
    else:
        buffer[:count].copy_(values)
    buffer[count:].fill_(padding)
