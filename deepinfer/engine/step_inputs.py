"""A scheduled step as device tensors: ids, the ragged layout, and the look-back of the n-gram memory.

Legend: T rows, R requests, B blocks of the longest table, G look-back, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator import StepLayout
from deepinfer.accelerator.upload import on_device
from deepinfer.scheduling.step import ScheduledStep


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the forward pass reads.

    Attributes:
        ids_T: int64 [T].
        history_RG: int64 [R, G], ids before each request's first row, nearest first, -1 where there is none.
        layout: the ragged layout.
        last_row_R: int64 [R], the row of each request that is sampled.
    """

    ids_T: torch.Tensor
    history_RG: torch.Tensor
    layout: StepLayout
    last_row_R: torch.Tensor


def build_step_inputs(step: ScheduledStep, *, block_size: int, ring: int, device: torch.device) -> StepInputs:
    """Move one step to the device; ``step`` must hold at least one request."""
    q_R = step.q_R.astype(np.int64)
    cached_R = step.cached_R.astype(np.int64)
    row_starts_R1 = np.zeros(len(q_R) + 1, np.int64)
    np.cumsum(q_R, out=row_starts_R1[1:])
    request_T = np.repeat(np.arange(len(q_R), dtype=np.int64), q_R)
    position_T = np.arange(row_starts_R1[-1], dtype=np.int64) - (row_starts_R1[:-1] - cached_R)[request_T]

    def moved(values: NDArray[np.generic]) -> torch.Tensor:
        return on_device(values, device)

    layout = StepLayout(
        kind="prefill" if step.kind == "prefill" else "decode",
        block_size=block_size,
        ring=ring,
        row_starts_R1=moved(row_starts_R1),
        cached_R=moved(cached_R),
        state_slots_R=moved(step.state_slot_R.astype(np.int64)),
        block_table_RB=moved(step.block_table_RB.astype(np.int64)),
        request_T=moved(request_T),
        position_T=moved(position_T),
        window_start_R=torch.zeros(len(q_R), dtype=torch.int64, device=device),
        image_T=moved(_image_rows(step, row_starts_R1)),
        valid_T=torch.ones(len(position_T), dtype=torch.bool, device=device),
        max_position=int((cached_R + q_R).max()),
        max_rows=int(q_R.max()),
    )
    return StepInputs(
        ids_T=moved(step.input_ids_T),
        history_RG=moved(step.history_RG),
        layout=layout,
        last_row_R=moved(row_starts_R1[1:] - 1),
    )


def _image_rows(step: ScheduledStep, row_starts_R1: NDArray[np.int64]) -> NDArray[np.bool_]:
    image_T = np.zeros(int(row_starts_R1[-1]), dtype=np.bool_)
    for number, sequence in enumerate(step.sequences):
        for span in sequence.image_spans:
            offset = int(row_starts_R1[number]) - int(step.cached_R[number])
            start = max(span.start + offset, int(row_starts_R1[number]))
            stop = min(span.stop + offset, int(row_starts_R1[number + 1]))
            image_T[start : max(start, stop)] = True
    return image_T
