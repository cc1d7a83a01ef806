"""Op group ``compression``: pairs of rows pooled by a softmax of their gates; rows that wait for their pair are kept.

Two kernels, because a row that is kept may take the place of one that another row of the same step still reads.

Legend: T rows, C latent width, Z state slots, P pending positions, W = 2C.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import PendingCache
from deepinfer.accelerator.ops.compression import CompressionOps
from deepinfer_triton.arithmetic import TritonGroup, refuse
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import aligned, consecutive
from deepinfer_triton.sizes import ModelSizes

LARGEST_BLOCK = 512


@kernel(unaligned=("pending_ptr", "position_ptr", "request_ptr", "valid_ptr", "cached_ptr", "slot_ptr"))
def pair_pooling_kernel(
    gate_ptr: tl.tensor,
    latent_ptr: tl.tensor,
    pending_ptr: tl.tensor,
    position_ptr: tl.tensor,
    request_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    cached_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: tl.int64,
    latent_stride: tl.int64,
    pending_slot_stride: tl.int64,
    pending_row_stride: tl.int64,
    capacity: tl.int64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and a block of its channels."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    position = tl.load(position_ptr + row)
    completes = (tl.load(valid_ptr + row) != 0) & (position % 2 == 1)
    request = tl.load(request_ptr + row, mask=completes, other=0)
    in_step = completes & (position - 1 >= tl.load(cached_ptr + request, mask=completes, other=0))
    waited = completes & (in_step == 0)
    slot = tl.load(slot_ptr + request, mask=waited, other=0)
    place = tl.where(waited, (position - 1) % capacity, 0)
    waiting = pending_ptr + slot * pending_slot_stride + place * pending_row_stride
    before = tl.where(in_step, row - 1, 0)
    here, there, kept = inside & completes, inside & in_step, inside & waited
    gate_now = tl.load(gate_ptr + row * gate_stride + channel, mask=here, other=0.0)
    latent_now = tl.load(latent_ptr + row * latent_stride + channel, mask=here, other=0.0)
    gate_before = tl.where(
        in_step,
        tl.load(gate_ptr + before * gate_stride + channel, mask=there, other=0.0),
        tl.load(waiting + channel, mask=kept, other=0.0),
    )
    latent_before = tl.where(
        in_step,
        tl.load(latent_ptr + before * latent_stride + channel, mask=there, other=0.0),
        tl.load(waiting + WIDTH + channel, mask=kept, other=0.0),
    )
    # Not a maximum instruction: those may return the other operand for NaN.
    largest = tl.where(gate_before > gate_now, gate_before, gate_now)
    weight_before = tl.exp(gate_before - largest)
    weight_now = tl.exp(gate_now - largest)
    total = weight_before + weight_now
    pooled = (weight_before / total) * latent_before + (weight_now / total) * latent_now
    tl.store(out_ptr + row * WIDTH + channel, tl.where(completes, pooled, 0.0), mask=inside)


@kernel(unaligned=("pending_ptr", "position_ptr", "request_ptr", "valid_ptr", "slot_ptr"))
def pair_keeping_kernel(
    gate_ptr: tl.tensor,
    latent_ptr: tl.tensor,
    pending_ptr: tl.tensor,
    position_ptr: tl.tensor,
    request_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    gate_stride: tl.int64,
    latent_stride: tl.int64,
    pending_slot_stride: tl.int64,
    pending_row_stride: tl.int64,
    capacity: tl.int64,
    rows: tl.int64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and a block of its channels; rows that a later one of the step replaces write nothing."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = tl.load(valid_ptr + row) != 0
    request = tl.load(request_ptr + row, mask=valid, other=0)
    # Positions of a request are consecutive, so that the row which takes this one's place lies `capacity` rows on.
    later = row + capacity
    exists = later < rows
    replaced = exists & (tl.load(valid_ptr + later, mask=exists, other=0) != 0)
    replaced = replaced & (tl.load(request_ptr + later, mask=exists, other=-1) == request)
    stored = valid & (replaced == 0)
    slot = tl.load(slot_ptr + request, mask=stored, other=0)
    place = tl.where(stored, tl.load(position_ptr + row) % capacity, 0)
    waiting = pending_ptr + slot * pending_slot_stride + place * pending_row_stride
    inside = (channel < WIDTH) & stored
    gate = tl.load(gate_ptr + row * gate_stride + channel, mask=inside, other=0.0)
    latent = tl.load(latent_ptr + row * latent_stride + channel, mask=inside, other=0.0)
    tl.store(waiting + channel, gate, mask=inside)
    tl.store(waiting + WIDTH + channel, latent, mask=inside)


@cache
def pooling_configuration(width: int) -> Configuration:
    """Return the configuration that pools rows of one width."""
    block = min(power_of_two(width), LARGEST_BLOCK)
    floats, integers = torch.float32, torch.int64
    signature = pointers(
        gate_ptr=floats,
        latent_ptr=floats,
        pending_ptr=floats,
        position_ptr=integers,
        request_ptr=integers,
        valid_ptr=torch.uint8,
        cached_ptr=integers,
        slot_ptr=integers,
        out_ptr=floats,
    )
    numbers = ("gate_stride", "latent_stride", "pending_slot_stride", "pending_row_stride", "capacity")
    return Configuration(
        pair_pooling_kernel,
        signature | dict.fromkeys(numbers, "i64"),
        {"WIDTH": width, "BLOCK": block},
        num_warps=warps_for(block),
    )


@cache
def keeping_configuration(width: int) -> Configuration:
    """Return the configuration that keeps rows of one width."""
    block = min(power_of_two(width), LARGEST_BLOCK)
    floats, integers = torch.float32, torch.int64
    signature = pointers(
        gate_ptr=floats,
        latent_ptr=floats,
        pending_ptr=floats,
        position_ptr=integers,
        request_ptr=integers,
        valid_ptr=torch.uint8,
        slot_ptr=integers,
    )
    numbers = ("gate_stride", "latent_stride", "pending_slot_stride", "pending_row_stride", "capacity", "rows")
    return Configuration(
        pair_keeping_kernel,
        signature | dict.fromkeys(numbers, "i64"),
        {"WIDTH": width, "BLOCK": block},
        num_warps=warps_for(block),
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's compressors use."""
    yield pooling_configuration(sizes.head_width)
    yield keeping_configuration(sizes.head_width)


class TritonCompressionOps(TritonGroup, CompressionOps):
    """The softmax over two rows written out, elementwise: R2 by construction."""

    def pool_pairs(self, gate_TC: Tensor, latent_TC: Tensor, pending: PendingCache, step: StepLayout) -> Tensor:
        """See :meth:`CompressionOps.pool_pairs`."""
        width = gate_TC.shape[-1]
        state = pending.rows_ZPW
        if gate_TC.dtype != torch.float32 or latent_TC.dtype != torch.float32 or state.dtype != torch.float32:
            problem = f"gate is {gate_TC.dtype}, latent {latent_TC.dtype} and pending rows are {state.dtype}"
            refuse("compression.pool_pairs", f"{problem}; give all three in float32")
        if latent_TC.shape != gate_TC.shape or state.shape[-1] != 2 * width or state.stride(-1) != 1:
            refuse(
                "compression.pool_pairs",
                f"gate {tuple(gate_TC.shape)}, latent {tuple(latent_TC.shape)} and pending rows {tuple(state.shape)} "
                f"do not fit; pending rows must hold gate and latent, one behind the other",
            )
        out_TC = torch.empty(gate_TC.shape, dtype=gate_TC.dtype, device=gate_TC.device)
        if step.requests == 0:
            return out_TC.zero_()
        gate_TC, latent_TC = aligned(gate_TC), aligned(latent_TC)
        position_T, request_T = consecutive(step.position_T), consecutive(step.request_T)
        valid_T, slots_R = consecutive(step.valid_T), consecutive(step.state_slots_R)
        pooling = pooling_configuration(width)
        grid = (step.rows, -(-width // int(pooling.constants["BLOCK"])))
        numbers = (gate_TC.stride(0), latent_TC.stride(0), state.stride(0), state.stride(1), pending.capacity)
        cached_R = consecutive(step.cached_R)
        rows = (gate_TC, latent_TC, state, position_T, request_T, valid_T)
        launch(pooling, grid, *rows, cached_R, slots_R, out_TC, *numbers)
        launch(keeping_configuration(width), grid, *rows, slots_R, *numbers, step.rows)
        return out_TC
