"""The ragged description of one step that every paged op reads.

Legend: T rows (new positions), R requests, B blocks of the longest table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

StepKind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step's rows, request by request, in scheduled order. All tensors are on the driver's device.

    In a decode step each request has at most ``backtrack`` rows and the window ring already holds this step's
    records when attention runs; in a prefill step the ring still holds what it held before the chunk.

    Attributes:
        kind: "prefill" or "decode".
        block_size: token positions per block.
        ring: positions per window ring.
        row_starts_R1: int64 [R+1], first row of each request, then T. A request of a recorded decode step may have no
            rows at all: it fills up a graph whose rows are others'.
        cached_R: int64 [R], positions of the request computed before this step.
        state_slots_R: int64 [R], state slot of each request.
        block_table_RB: int64 [R, B], block numbers, 0 where the table ends.
        request_T: int64 [T], request of each row.
        position_T: int64 [T], absolute position of each row.
        window_start_R: int64 [R], first position that a window of this request may read (0 unless truncated).
        image_T: bool [T], the row lies in an image span.
        valid_T: bool [T], False for padding rows: they write nothing, choose no expert, and their results are
            unspecified but finite.
        max_position: largest position of the step plus one (host integer, for sizing).
        max_rows: largest number of rows of one request (host integer).
    """

    kind: StepKind
    block_size: int
    ring: int
    row_starts_R1: torch.Tensor
    cached_R: torch.Tensor
    state_slots_R: torch.Tensor
    block_table_RB: torch.Tensor
    request_T: torch.Tensor
    position_T: torch.Tensor
    window_start_R: torch.Tensor
    image_T: torch.Tensor
    valid_T: torch.Tensor
    max_position: int
    max_rows: int

    @property
    def rows(self) -> int:
        """T, the number of rows."""
        return int(self.position_T.shape[0])

    @property
    def requests(self) -> int:
        """R, the number of requests."""
        return int(self.cached_R.shape[0])
