"""Addresses from positions and block tables, by torch's integer operators on the device.

Legend: T rows, R requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops.plumbing import PlumbingOps
from deepinfer_ascend.arithmetic import refuse


class NativePlumbing(PlumbingOps):
    """int64 throughout; nothing waits for the device."""

    def window_slots(self, step: StepLayout) -> Tensor:
        """See :meth:`PlumbingOps.window_slots`."""
        if step.requests == 0:
            return torch.full_like(step.position_T, -1)
        request_T = step.request_T.masked_fill(~step.valid_T, 0)
        slot_T = step.state_slots_R.index_select(0, request_T) * step.ring + step.position_T % step.ring
        last_T = _last_positions(step).index_select(0, request_T)
        # A later row of the same chunk takes the place of anything a whole ring before it.
        return slot_T.masked_fill((step.position_T <= last_T - step.ring) | ~step.valid_T, -1)

    def entry_slots(self, step: StepLayout, ratio: int) -> Tensor:
        """See :meth:`PlumbingOps.entry_slots`."""
        if ratio < 1 or step.block_size % ratio:
            refuse("plumbing.entry_slots", f"ratio {ratio} does not divide the block size {step.block_size}")
        if step.requests == 0 or step.block_table_RB.shape[1] == 0:
            return torch.full_like(step.position_T, -1)
        entries = step.block_size // ratio
        entry_T = torch.div(step.position_T, ratio, rounding_mode="floor")
        completes_T = step.valid_T & ((step.position_T + 1) % ratio == 0)
        column_T = torch.div(entry_T, entries, rounding_mode="floor").masked_fill(~completes_T, 0)
        request_T = step.request_T.masked_fill(~step.valid_T, 0)
        place_T = request_T * step.block_table_RB.shape[1] + column_T
        block_T = step.block_table_RB.flatten().index_select(0, place_T)
        return (block_T * entries + entry_T % entries).masked_fill(~completes_T, -1)


def _last_positions(step: StepLayout) -> Tensor:
    """Return int64 [R]: the largest position of each request's valid rows, -1 where it has none."""
    number_R1 = torch.arange(step.requests, device=step.request_T.device).unsqueeze(1)
    mine_RT = (step.request_T.unsqueeze(0) == number_R1) & step.valid_T.unsqueeze(0)
    if step.rows == 0:
        return torch.full_like(step.cached_R, -1)
    return torch.where(mine_RT, step.position_T.unsqueeze(0), -1).amax(dim=1)
