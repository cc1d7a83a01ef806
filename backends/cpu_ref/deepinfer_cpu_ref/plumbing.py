"""Addresses from positions and block tables.

Legend: T rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops.plumbing import PlumbingOps
from deepinfer_cpu_ref.computation import refuse
from deepinfer_cpu_ref.rows import last_positions, paged_slots, per_row, request_of_rows


class CpuRefPlumbing(PlumbingOps):
    """Integer arithmetic in int64."""

    def window_slots(self, step: StepLayout) -> Tensor:
        """See :meth:`PlumbingOps.window_slots`."""
        slot_T = per_row(step.state_slots_R, step) * step.ring + step.position_T % step.ring
        # A later row of the same chunk takes the place of anything a whole ring before it.
        overwritten_T = step.position_T <= per_row(last_positions(step), step) - step.ring
        return slot_T.masked_fill(overwritten_T | ~step.valid_T, -1)

    def entry_slots(self, step: StepLayout, ratio: int) -> Tensor:
        """See :meth:`PlumbingOps.entry_slots`."""
        if ratio < 1 or step.block_size % ratio:
            refuse("plumbing.entry_slots", f"ratio {ratio} does not divide the block size {step.block_size}")
        completes_T = step.valid_T & ((step.position_T + 1) % ratio == 0)
        entry_T = torch.where(completes_T, step.position_T // ratio, -1)
        return paged_slots(step.block_table_RB, request_of_rows(step), entry_T, step.block_size // ratio)
