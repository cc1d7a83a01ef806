"""Per-row and per-request facts of a step that several ops need.

Padding rows may name any request, so their request is read as 0 and their results are masked by the caller.

Legend: T rows, R requests, B blocks of the longest table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout


def request_of_rows(step: StepLayout) -> Tensor:
    """Return int64 [T]: the request of each row, 0 for padding rows."""
    return step.request_T.masked_fill(~step.valid_T, 0)


def per_row(values_R: Tensor, step: StepLayout) -> Tensor:
    """Return the request's value for each row; zeros in a step without requests."""
    if step.requests == 0:
        return values_R.new_zeros((step.rows,))
    return values_R[request_of_rows(step)]


def last_positions(step: StepLayout) -> Tensor:
    """Return int64 [R]: the largest position that each request computes in this step, -1 if it computes none."""
    last_R = torch.full((step.requests,), -1, dtype=torch.int64, device=step.position_T.device)
    if step.requests == 0:
        return last_R
    position_T = step.position_T.masked_fill(~step.valid_T, -1)
    return last_R.scatter_reduce(0, request_of_rows(step), position_T, reduce="amax")


def paged_slots(block_table: Tensor, request: Tensor, entries: Tensor, entries_per_block: int) -> Tensor:
    """Return flat slots ``table[request, e // E] * E + e % E``, -1 where the entry is -1.

    Args:
        block_table: int64 [R, B].
        request: int64, broadcast against ``entries``.
        entries: int64 entry numbers, -1 where there is none.
        entries_per_block: E.
    """
    if block_table.numel() == 0:
        return torch.full_like(entries, -1)
    known = entries.clamp(min=0)
    block = block_table[request.expand_as(entries), known // entries_per_block]
    return (block * entries_per_block + known % entries_per_block).masked_fill(entries < 0, -1)
