"""Rows of the n-gram table, decoded to activations.

A table in host memory is read there, as bytes, and only the rows that were asked for go to the device.

Legend: T rows, F hash columns, R table rows, W row width, G scales of a row, n = T * F looked-up rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer.accelerator.ops.memory import NgramTable
from deepinfer_triton.arithmetic import ACTIVATION_DTYPES, Arithmetic, refuse, require_float, require_shape
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two
from deepinfer_triton.jit import kernel
from deepinfer_triton.number_formats import e4m3_value, e8m0_value
from deepinfer_triton.rows import consecutive
from deepinfer_triton.sizes import ModelSizes

GROUP = 32


@kernel(unaligned=("table_ptr", "scale_ptr", "row_ptr"))
def table_rows_kernel(
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.int64,
    scale_stride: tl.int64,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CODES: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """One program a looked-up row; row -1 reads nothing and gives zeros."""
    number = tl.program_id(0).to(tl.int64)
    wanted = tl.load(row_ptr + number)
    exists = wanted >= 0
    row = tl.where(exists, wanted, 0)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < WIDTH
    place = table_ptr + row * table_stride + column
    if CODES:
        code = tl.load(place, mask=inside & exists, other=0).to(tl.int32)
        real = (group * GROUP < WIDTH) & exists
        scale = e8m0_value(tl.load(scale_ptr + row * scale_stride + group, mask=real, other=0).to(tl.int32))
        value = e4m3_value(code) * scale[:, None]
    else:
        value = tl.load(place, mask=inside & exists, other=0.0).to(tl.float32)
    if NARROW:
        value = value.to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + number * WIDTH + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def configuration(width: int, table: torch.dtype, activation: torch.dtype, *, served: bool) -> Configuration:
    """Return the configuration for tables of one width; a dtype of bytes means e4m3 codes with scales."""
    signature = pointers(table_ptr=table, scale_ptr=torch.uint8, row_ptr=torch.int64, out_ptr=activation)
    constants = {
        "WIDTH": width,
        "GROUP": GROUP,
        "GROUPS": power_of_two(-(-width // GROUP)),
        "CODES": table == torch.uint8,
        "NARROW": served and activation != torch.bfloat16,
    }
    return Configuration(
        table_rows_kernel, {**signature, "table_stride": "i64", "scale_stride": "i64"}, constants, num_warps=1
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's tables use, in every format."""
    for table in (torch.uint8, *ACTIVATION_DTYPES):
        yield configuration(sizes.ngram_width, table, torch.float32, served=False)
        yield configuration(sizes.ngram_width, table, torch.float32, served=True)
        yield configuration(sizes.ngram_width, table, torch.bfloat16, served=True)


def gather_rows(table: NgramTable, rows_TF: Tensor, arithmetic: Arithmetic) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.MemoryOps.gather_rows`."""
    values, scales = table.rows_RW, table.scales
    if scales is None:
        require_float("memory.gather_rows", f"table {table.name!r}", values)
    else:
        values, scales = values.view(torch.uint8), scales.view(torch.uint8)
        require_shape("memory.gather_rows", "scales", scales, (values.shape[0], -(-values.shape[1] // GROUP)))
    if any(part.shape[-1] > 1 and part.stride(-1) != 1 for part in (values, scales) if part is not None):
        refuse(
            "memory.gather_rows", f"table {table.name!r} has strides {values.stride()}; its rows must be consecutive"
        )
    rows_n, device = rows_TF.reshape(-1), rows_TF.device
    if values.device != device:
        values, scales, rows_n = _fetched(values, scales, rows_n)
    width = values.shape[1]
    out_nW = torch.empty((rows_n.shape[0], width), dtype=arithmetic.activation, device=device)
    launch(
        configuration(width, values.dtype, arithmetic.activation, served=arithmetic.served),
        (rows_n.shape[0],),
        values,
        torch.empty(0, dtype=torch.uint8, device=device) if scales is None else scales,
        consecutive(rows_n),
        out_nW,
        values.stride(0),
        0 if scales is None else scales.stride(0),
    )
    return out_nW.view(rows_TF.shape[0], rows_TF.shape[1] * width)


def _fetched(values: Tensor, scales: Tensor | None, rows_n: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the wanted rows of a table elsewhere, on the device of the row numbers, and their numbers there."""
    device = rows_n.device
    wanted_n = rows_n.to(values.device).clamp(min=0)
    found = values.index_select(0, wanted_n).to(device)
    found_scales = None if scales is None else scales.index_select(0, wanted_n).to(device)
    numbers_n = torch.arange(rows_n.shape[0], dtype=torch.int64, device=device)
    return found, found_scales, torch.where(rows_n < 0, -1, numbers_n)
