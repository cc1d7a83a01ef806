"""Rows of a table by number, in the activation dtype.

Legend: T rows, V vocabulary, D hidden size.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.arithmetic import refuse, require_float
from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two, warps_for
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import consecutive

LARGEST_BLOCK = 2048


@kernel(unaligned=("ids_ptr", "table_ptr"))
def embedding_kernel(
    ids_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.int64,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and a block of its channels."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = table_ptr + tl.load(ids_ptr + row) * table_stride + column
    value = tl.load(place, mask=inside, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, value.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def configuration(width: int, table: torch.dtype, activation: torch.dtype) -> Configuration:
    """Return the configuration for tables of one width and dtype."""
    block = min(power_of_two(width), LARGEST_BLOCK)
    signature = pointers(ids_ptr=torch.int64, table_ptr=table, out_ptr=activation)
    constants = {"WIDTH": width, "BLOCK": block}
    return Configuration(embedding_kernel, {**signature, "table_stride": "i64"}, constants, warps_for(block))


def embed(ids_T: Tensor, table_VD: Tensor, activation: torch.dtype) -> Tensor:
    """See :meth:`deepinfer.accelerator.ops.LinearOps.embed`."""
    require_float("linear.embed", "the table", table_VD)
    width = table_VD.shape[1]
    if width > 1 and table_VD.stride(1) != 1:
        refuse("linear.embed", f"the table has strides {table_VD.stride()}; its rows must be consecutive")
    out_TD = torch.empty((ids_T.shape[0], width), dtype=activation, device=table_VD.device)
    chosen = configuration(width, table_VD.dtype, activation)
    grid = (ids_T.shape[0], -(-width // int(chosen.constants["BLOCK"])))
    launch(chosen, grid, consecutive(ids_T), table_VD, out_TD, table_VD.stride(0))
    return out_TD
