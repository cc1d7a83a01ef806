"""Op group ``plumbing``: addresses from positions and block tables, in 64 bits.

Legend: T rows, R requests, B blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops.plumbing import PlumbingOps
from deepinfer_triton.arithmetic import TritonGroup, refuse
from deepinfer_triton.configuration import Configuration, launch, pointers
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import consecutive
from deepinfer_triton.sizes import ModelSizes

ROWS = 128


@kernel(unaligned=("position_ptr", "request_ptr", "valid_ptr", "slot_ptr"))
def window_slots_kernel(
    position_ptr: tl.tensor,
    request_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int64,
    ring: tl.int64,
    ROWS: tl.constexpr,
) -> None:
    """One program a block of rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    valid = here & (tl.load(valid_ptr + row, mask=here, other=0) != 0)
    position = tl.load(position_ptr + row, mask=valid, other=0)
    request = tl.load(request_ptr + row, mask=valid, other=0)
    # Positions of a request are consecutive, so that the row which takes this one's place lies `ring` rows on.
    later = row + ring
    exists = later < rows
    overwritten = exists & (tl.load(valid_ptr + later, mask=exists, other=0) != 0)
    overwritten = overwritten & (tl.load(request_ptr + later, mask=exists, other=-1) == request)
    slot = tl.load(slot_ptr + request, mask=valid, other=0) * ring + position % ring
    tl.store(out_ptr + row, tl.where(valid & (overwritten == 0), slot, -1), mask=here)


@kernel(unaligned=("position_ptr", "request_ptr", "valid_ptr", "table_ptr"))
def entry_slots_kernel(
    position_ptr: tl.tensor,
    request_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int64,
    ratio: tl.int64,
    entries_per_block: tl.int64,
    table_stride: tl.int64,
    ROWS: tl.constexpr,
) -> None:
    """One program a block of rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    valid = here & (tl.load(valid_ptr + row, mask=here, other=0) != 0)
    position = tl.load(position_ptr + row, mask=valid, other=0)
    completes = valid & ((position + 1) % ratio == 0)
    request = tl.load(request_ptr + row, mask=completes, other=0)
    entry = position // ratio
    number = entry // entries_per_block
    block = tl.load(table_ptr + request * table_stride + number, mask=completes, other=0)
    slot = block * entries_per_block + (entry - number * entries_per_block)
    tl.store(out_ptr + row, tl.where(completes, slot, -1), mask=here)


def window_configuration() -> Configuration:
    """Return the one configuration of window slots."""
    integers = torch.int64
    signature = pointers(
        position_ptr=integers, request_ptr=integers, valid_ptr=torch.uint8, slot_ptr=integers, out_ptr=integers
    )
    return Configuration(window_slots_kernel, {**signature, "rows": "i64", "ring": "i64"}, {"ROWS": ROWS})


def entry_configuration() -> Configuration:
    """Return the one configuration of entry slots."""
    integers = torch.int64
    signature = pointers(
        position_ptr=integers, request_ptr=integers, valid_ptr=torch.uint8, table_ptr=integers, out_ptr=integers
    )
    numbers = ("rows", "ratio", "entries_per_block", "table_stride")
    return Configuration(entry_slots_kernel, signature | dict.fromkeys(numbers, "i64"), {"ROWS": ROWS})


def configurations(_: ModelSizes) -> Iterator[Configuration]:
    """Yield both; sizes of models do not matter."""
    yield window_configuration()
    yield entry_configuration()


class TritonPlumbingOps(TritonGroup, PlumbingOps):
    """Integer arithmetic in int64."""

    def window_slots(self, step: StepLayout) -> Tensor:
        """See :meth:`PlumbingOps.window_slots`."""
        out_T = torch.empty((step.rows,), dtype=torch.int64, device=step.position_T.device)
        if step.requests == 0:
            return out_T.fill_(-1)
        rows = (consecutive(step.position_T), consecutive(step.request_T), consecutive(step.valid_T))
        grid = (-(-step.rows // ROWS),)
        launch(window_configuration(), grid, *rows, consecutive(step.state_slots_R), out_T, step.rows, step.ring)
        return out_T

    def entry_slots(self, step: StepLayout, ratio: int) -> Tensor:
        """See :meth:`PlumbingOps.entry_slots`."""
        if ratio < 1 or step.block_size % ratio:
            refuse("plumbing.entry_slots", f"ratio {ratio} does not divide the block size {step.block_size}")
        out_T = torch.empty((step.rows,), dtype=torch.int64, device=step.position_T.device)
        table_RB = consecutive(step.block_table_RB)
        if table_RB.numel() == 0:
            return out_T.fill_(-1)
        rows = (consecutive(step.position_T), consecutive(step.request_T), consecutive(step.valid_T))
        numbers = (step.rows, ratio, step.block_size // ratio, table_RB.stride(0))
        launch(entry_configuration(), (-(-step.rows // ROWS),), *rows, table_RB, out_T, *numbers)
        return out_T
