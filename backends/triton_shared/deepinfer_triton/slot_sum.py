"""The combine of experts: the shared output first, then slots in order, in float32, rounded once.

Legend: T rows, k slots, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, require_float, require_shape
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import aligned
from deepinfer_triton.sizes import ModelSizes

LARGEST_BLOCK = 1024


@kernel()
def slot_sum_kernel(
    shared_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    shared_stride: tl.int64,
    slots_row_stride: tl.int64,
    slots_slot_stride: tl.int64,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and a block of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.load(shared_ptr + row * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        place = slots_ptr + row * slots_row_stride + slot * slots_slot_stride + column
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def configuration(
    slots: int, width: int, shared: torch.dtype, slot: torch.dtype, activation: torch.dtype
) -> Configuration:
    """Return the configuration that adds so many slots of one width."""
    block = min(power_of_two(width), LARGEST_BLOCK)
    signature = pointers(shared_ptr=shared, slots_ptr=slot, out_ptr=activation)
    numbers = ("shared_stride", "slots_row_stride", "slots_slot_stride")
    return Configuration(
        slot_sum_kernel,
        signature | dict.fromkeys(numbers, "i64"),
        {"SLOTS": slots, "WIDTH": width, "BLOCK": block},
        num_warps=warps_for(block),
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's layers use: experts give float32."""
    for _, top_k in sizes.routers:
        for activation in ACTIVATION_DTYPES:
            yield configuration(top_k, sizes.hidden, torch.float32, torch.float32, activation)


def combine(shared_TD: Tensor, slots_TkD: Tensor, activation: torch.dtype) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.ExpertOps.combine`."""
    require_float("experts.combine", "shared", shared_TD)
    require_float("experts.combine", "slots", slots_TkD)
    rows, slots, width = slots_TkD.shape
    require_shape("experts.combine", "shared", shared_TD, (rows, width))
    shared_TD, slots_TkD = aligned(shared_TD), aligned(slots_TkD)
    out_TD = torch.empty((rows, width), dtype=activation, device=shared_TD.device)
    chosen = configuration(slots, width, shared_TD.dtype, slots_TkD.dtype, activation)
    launch(
        chosen,
        (rows, -(-width // int(chosen.constants["BLOCK"]))),
        shared_TD,
        slots_TkD,
        out_TD,
        shared_TD.stride(0),
        slots_TkD.stride(0),
        slots_TkD.stride(1),
    )
    return out_TD
