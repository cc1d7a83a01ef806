"""Changes of logits before the temperature, in place: sparse entries one by one, whole rows in chunks.

Legend: B rows, V vocabulary, N entries, M restricted rows, W words of a bitmask.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.sampling import AllowedEntries, LogitAdjustments
from deepinfer_triton.configuration import Configuration, launch, pointers
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.rows import consecutive

ENTRIES = 128
CHUNK = 2048
BIAS, BAN, SAVE, RESTORE = 0, 1, 2, 3
"""What happens at an entry: a value is added, minus infinity is added, or the logit is kept and put back."""

_BIAS = tl.constexpr(BIAS)
_BAN = tl.constexpr(BAN)
_SAVE = tl.constexpr(SAVE)
_INFINITY = tl.constexpr(float("inf"))
_WORD_BITS = tl.constexpr(32)


@device_function
def logit_places(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    number: tl.tensor,
    real: tl.tensor,
    stride: tl.tensor,
) -> tl.tensor:
    """Return pointers to the logits of entries."""
    row = tl.load(rows_ptr + number, mask=real, other=0)
    return logits_ptr + row * stride + tl.load(ids_ptr + number, mask=real, other=0)


@kernel(unaligned=("logits_ptr", "rows_ptr", "ids_ptr", "values_ptr"))
def logit_entries_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    values_ptr: tl.tensor,
    count: tl.int64,
    stride: tl.int64,
    ACTION: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    """One program a block of entries. Entries of one place write the same value, so that their order is free."""
    number = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    real = number < count
    place = logit_places(logits_ptr, rows_ptr, ids_ptr, number, real, stride)
    if ACTION == _SAVE:
        tl.store(values_ptr + number, tl.load(place, mask=real, other=0.0), mask=real)
    elif ACTION == _BIAS:
        value = tl.load(values_ptr + number, mask=real, other=0.0)
        tl.store(place, tl.load(place, mask=real, other=0.0) + value, mask=real)
    elif ACTION == _BAN:
        tl.store(place, tl.load(place, mask=real, other=0.0) - _INFINITY, mask=real)
    else:
        tl.store(place, tl.load(values_ptr + number, mask=real, other=0.0), mask=real)


@kernel(unaligned=("logits_ptr", "rows_ptr", "ids_ptr", "factors_ptr", "subtract_ptr"))
def penalties_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    subtract_ptr: tl.tensor,
    count: tl.int64,
    stride: tl.int64,
    ENTRIES: tl.constexpr,
) -> None:
    """One program a block of entries, each place named once.

    Quotients and products of two float32 go through float64 and are rounded once: that is their correct rounding, and
    a product cannot be fused with the subtraction behind it.
    """
    number = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    real = number < count
    place = logit_places(logits_ptr, rows_ptr, ids_ptr, number, real, stride)
    seen = tl.load(place, mask=real, other=0.0)
    factor = tl.load(factors_ptr + number, mask=real, other=1.0).to(tl.float64)
    wide = seen.to(tl.float64)
    repeated = tl.where(seen > 0.0, wide / factor, wide * factor).to(tl.float32)
    tl.store(place, repeated - tl.load(subtract_ptr + number, mask=real, other=0.0), mask=real)


@kernel(unaligned=("logits_ptr", "rows_ptr"))
def row_mask_kernel(
    logits_ptr: tl.tensor, rows_ptr: tl.tensor, width: tl.int64, stride: tl.int64, CHUNK: tl.constexpr
) -> None:
    """One program a row and a chunk of it: everything is banned."""
    token = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    place = logits_ptr + tl.load(rows_ptr + tl.program_id(0)) * stride + token
    inside = token < width
    tl.store(place, tl.load(place, mask=inside, other=0.0) - _INFINITY, mask=inside)


@kernel(unaligned=("logits_ptr", "mask_ptr"))
def bitmask_kernel(
    logits_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    width: tl.int64,
    stride: tl.int64,
    mask_stride: tl.int64,
    CHUNK: tl.constexpr,
) -> None:
    """One program a row and a chunk of it."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = token < width
    word = tl.load(mask_ptr + row * mask_stride + token // _WORD_BITS, mask=inside, other=-1)
    is_banned = ((word >> (token % _WORD_BITS).to(tl.int32)) & 1) == 0
    place = logits_ptr + row * stride + token
    tl.store(place, tl.load(place, mask=inside, other=0.0) - _INFINITY, mask=inside & is_banned)


@cache
def entries_configuration(action: int) -> Configuration:
    """Return the configuration of one action."""
    whole, floats = torch.int64, torch.float32
    signature = pointers(logits_ptr=floats, rows_ptr=whole, ids_ptr=whole, values_ptr=floats)
    constants = {"ACTION": action, "ENTRIES": ENTRIES}
    return Configuration(logit_entries_kernel, {**signature, "count": "i64", "stride": "i64"}, constants)


@cache
def penalties_configuration() -> Configuration:
    """Return the one configuration of penalties."""
    whole, floats = torch.int64, torch.float32
    signature = pointers(logits_ptr=floats, rows_ptr=whole, ids_ptr=whole, factors_ptr=floats, subtract_ptr=floats)
    return Configuration(penalties_kernel, {**signature, "count": "i64", "stride": "i64"}, {"ENTRIES": ENTRIES})


@cache
def row_mask_configuration() -> Configuration:
    """Return the one configuration that bans whole rows."""
    signature = pointers(logits_ptr=torch.float32, rows_ptr=torch.int64)
    return Configuration(row_mask_kernel, {**signature, "width": "i64", "stride": "i64"}, {"CHUNK": CHUNK})


@cache
def bitmask_configuration() -> Configuration:
    """Return the one configuration of bitmasks."""
    signature = pointers(logits_ptr=torch.float32, mask_ptr=torch.int32)
    numbers = ("width", "stride", "mask_stride")
    return Configuration(bitmask_kernel, signature | dict.fromkeys(numbers, "i64"), {"CHUNK": CHUNK})


def adjust(logits_BV: Tensor, adjustments: LogitAdjustments) -> None:
    """See :meth:`deepinfer.accelerator.ops.SamplingOps.adjust`."""
    if logits_BV.numel() == 0:
        return
    nothing = logits_BV.new_empty(0)
    bias, penalties, bans = adjustments.bias, adjustments.penalties, adjustments.bans
    if bias is not None:
        _at_entries(logits_BV, bias.rows_N, bias.ids_N, bias.values_N.contiguous(), BIAS)
    if penalties is not None:
        count = penalties.ids_N.shape[0]
        launch(
            penalties_configuration(),
            (-(-count // ENTRIES),),
            logits_BV,
            consecutive(penalties.rows_N),
            consecutive(penalties.ids_N),
            penalties.factors_N.contiguous(),
            penalties.subtract_N.contiguous(),
            count,
            logits_BV.stride(0),
        )
    if bans is not None:
        _at_entries(logits_BV, bans.rows_N, bans.ids_N, nothing, BAN)
    if adjustments.allowed is not None:
        _restrict(logits_BV, adjustments.allowed)
    if adjustments.bitmask_BW is not None:
        bitmask_BW = consecutive(adjustments.bitmask_BW)
        rows, width = logits_BV.shape
        launch(
            bitmask_configuration(),
            (rows, -(-width // CHUNK)),
            logits_BV,
            bitmask_BW,
            width,
            logits_BV.stride(0),
            bitmask_BW.stride(0),
        )


def _restrict(logits_BV: Tensor, allowed: AllowedEntries) -> None:
    """Keep what is allowed, ban whole rows, put back what was kept."""
    rows_N, ids_N = allowed.entries.rows_N, allowed.entries.ids_N
    kept_N = logits_BV.new_empty(ids_N.shape[0])
    _at_entries(logits_BV, rows_N, ids_N, kept_N, SAVE)
    rows_M, width = allowed.restricted_rows_M, logits_BV.shape[1]
    grid = (rows_M.shape[0], -(-width // CHUNK))
    launch(row_mask_configuration(), grid, logits_BV, consecutive(rows_M), width, logits_BV.stride(0))
    _at_entries(logits_BV, rows_N, ids_N, kept_N, RESTORE)


def _at_entries(logits_BV: Tensor, rows_N: Tensor, ids_N: Tensor, values_N: Tensor, action: int) -> None:
    count = ids_N.shape[0]
    launch(
        entries_configuration(action),
        (-(-count // ENTRIES),),
        logits_BV,
        consecutive(rows_N),
        consecutive(ids_N),
        values_N,
        count,
        logits_BV.stride(0),
    )
