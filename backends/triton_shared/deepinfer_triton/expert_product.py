"""The two launches of an expert feed-forward: gate and up with what lies between, then down.

A program has the rows of one tile (`expert_tiles`) and a block of out features; without routing the one expert has all
rows. Rows keep their slot's place, so that nothing has to be sorted back and a combine can add in order.

Legend: n slots, D hidden size, I intermediate size, E experts.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl

from deepinfer_triton.configuration import Configuration, pointers
from deepinfer_triton.jit import device_function, kernel
from deepinfer_triton.number_formats import INFINITY_BITS, fp8_codes, fp8_scales, largest_magnitude
from deepinfer_triton.rows import alignment_of
from deepinfer_triton.stored_matrices import GROUP, MXFP4
from deepinfer_triton.tile_product import CODES, tile_of, tile_product

_GROUP = tl.constexpr(GROUP)


@device_function
def matrix_rows(
    weight_ptr: tl.tensor,
    expert: tl.tensor,
    column: tl.tensor,
    columns: tl.tensor,
    ROW_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> tl.tensor:
    """Return pointers to the rows of an expert's matrix."""
    return weight_ptr + tl.multiple_of((expert * columns + column) * ROW_BYTES, ALIGNMENT)


@kernel()
def gate_up_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    gate_scale_ptr: tl.tensor,
    up_ptr: tl.tensor,
    up_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_first_ptr: tl.tensor,
    tile_last_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    hidden_scale_ptr: tl.tensor,
    x_stride: tl.int64,
    rows: tl.int64,
    columns: tl.int64,
    scale_rows: tl.int64,
    top_k: tl.int64,
    limit: tl.float32,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    X_ALIGNMENT: tl.constexpr,
    ROUTED: tl.constexpr,
    SERVED: tl.constexpr,
    ENCODES: tl.constexpr,
) -> None:
    """One program a tile of slots and a block of the intermediate features."""
    tile = tl.program_id(0)
    expert = tl.zeros((), tl.int64)
    if ROUTED:
        expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
        if expert < 0:
            return
        place = tl.load(tile_first_ptr + tile) + tl.arange(0, ROWS)
        here = place < tl.load(tile_last_ptr + tile)
        slot = tl.load(order_ptr + place, mask=here, other=0).to(tl.int64)
        row = slot // top_k
    else:
        slot = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        here = slot < rows
        row = slot
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < columns
    x_row = x_ptr + tl.multiple_of(row * x_stride, X_ALIGNMENT)
    x_scale_row = x_scale_ptr + row * SCALES
    scale = (expert * scale_rows + column // SCALE_ROWS) * SCALES
    gate = tile_product(
        x_row, x_scale_row, here, matrix_rows(gate_ptr, expert, column, columns, ROW_BYTES, ALIGNMENT),
        gate_scale_ptr + scale, known, 0, K, PIECE, FORMAT, PRODUCT, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    up = tile_product(
        x_row, x_scale_row, here, matrix_rows(up_ptr, expert, column, columns, ROW_BYTES, ALIGNMENT),
        up_scale_ptr + scale, known, 0, K, PIECE, FORMAT, PRODUCT, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    if SERVED:
        gate = gate.to(tl.bfloat16).to(tl.float32)
        up = up.to(tl.bfloat16).to(tl.float32)
    # Comparisons are false for NaN, so that it passes: a minimum that returned the other operand would hide it.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < 0.0 - limit, 0.0 - limit, up)
    hidden = tl.trans(gate / (1.0 + tl.exp(0.0 - gate)) * up)
    if SERVED and ROUTED:
        hidden = hidden * tl.load(weight_ptr + slot, mask=here, other=0.0)[:, None]
    out = hidden_ptr + (slot * columns)[:, None] + column[None, :]
    mask = here[:, None] & known[None, :]
    if ENCODES:
        # Features beyond the last are zero: their weights were not loaded.
        BLOCKS: tl.constexpr = COLUMNS // _GROUP
        blocks = tl.reshape(hidden, (ROWS * BLOCKS, _GROUP))
        largest = largest_magnitude(blocks)
        finite = largest < INFINITY_BITS
        power = fp8_scales(largest)
        codes = tl.reshape(fp8_codes(blocks, power, finite), (ROWS, COLUMNS))
        tl.store(out, codes.to(tl.uint8), mask=mask)
        number = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        stored = (columns + _GROUP - 1) // _GROUP
        powers = tl.reshape(tl.where(finite, power, 255), (ROWS, BLOCKS)).to(tl.uint8)
        target = hidden_scale_ptr + (slot * stored)[:, None] + number[None, :]
        tl.store(target, powers, mask=here[:, None] & (number < stored)[None, :])
    else:
        tl.store(out, hidden.to(hidden_ptr.dtype.element_ty), mask=mask)


@kernel()
def down_kernel(
    hidden_ptr: tl.tensor,
    hidden_scale_ptr: tl.tensor,
    down_ptr: tl.tensor,
    down_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_first_ptr: tl.tensor,
    tile_last_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.int64,
    columns: tl.int64,
    scale_rows: tl.int64,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    X_ALIGNMENT: tl.constexpr,
    ROUTED: tl.constexpr,
    SERVED: tl.constexpr,
) -> None:
    """One program a tile of slots and a block of the hidden features; slots that lie in no tile are not written."""
    tile = tl.program_id(0)
    expert = tl.zeros((), tl.int64)
    if ROUTED:
        expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
        if expert < 0:
            return
        place = tl.load(tile_first_ptr + tile) + tl.arange(0, ROWS)
        here = place < tl.load(tile_last_ptr + tile)
        slot = tl.load(order_ptr + place, mask=here, other=0).to(tl.int64)
    else:
        slot = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        here = slot < rows
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < columns
    x_row = hidden_ptr + tl.multiple_of(slot * K, X_ALIGNMENT)
    scale = (expert * scale_rows + column // SCALE_ROWS) * SCALES
    product = tile_product(
        x_row, hidden_scale_ptr + slot * SCALES, here,
        matrix_rows(down_ptr, expert, column, columns, ROW_BYTES, ALIGNMENT),
        down_scale_ptr + scale, known, 0, K, PIECE, FORMAT, PRODUCT, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    if SERVED:
        product = product.to(tl.bfloat16).to(tl.float32)
    elif ROUTED:
        product = product * tl.load(weight_ptr + slot, mask=here, other=0.0)[None, :]
    out = out_ptr + (slot * columns)[None, :] + column[:, None]
    tl.store(out, product.to(out_ptr.dtype.element_ty), mask=known[:, None] & here[None, :])


def _shared_constants(in_features: int, weight: torch.dtype, x: torch.dtype, kind: int, depth: int) -> dict[str, int]:
    width = in_features // 2 if kind == MXFP4 else in_features
    return {
        "PIECE": -(-in_features // depth) * depth,
        "ROW_BYTES": width,
        "SCALES": -(-in_features // GROUP),
        "SCALE_ROWS": 1 if kind == MXFP4 else GROUP,
        "ALIGNMENT": alignment_of(width, weight),
        "X_ALIGNMENT": alignment_of(in_features, x),
    }


_TILE_POINTERS = {
    "weight_ptr": torch.float32,
    "order_ptr": torch.int32,
    "tile_expert_ptr": torch.int32,
    "tile_first_ptr": torch.int32,
    "tile_last_ptr": torch.int32,
}


@cache
def gate_up_configuration(
    in_features: int,
    weight: torch.dtype,
    x: torch.dtype,
    hidden: torch.dtype,
    *,
    kind: int,
    product: int,
    many_rows: bool,
    routed: bool,
    served: bool,
) -> Configuration:
    """Return the configuration of gate and up; a hidden dtype of bytes means codes with scales."""
    tile = tile_of(kind, product, many_rows=many_rows)
    read = torch.uint8 if product == CODES else x
    signature = pointers(
        x_ptr=read,
        x_scale_ptr=torch.uint8,
        gate_ptr=weight,
        gate_scale_ptr=torch.uint8,
        up_ptr=weight,
        up_scale_ptr=torch.uint8,
        **_TILE_POINTERS,
        hidden_ptr=hidden,
        hidden_scale_ptr=torch.uint8,
    )
    signature |= dict.fromkeys(("x_stride", "rows", "columns", "scale_rows", "top_k"), "i64") | {"limit": "fp32"}
    constants = {"K": in_features, "FORMAT": kind, "PRODUCT": product, **tile.constants()}
    constants |= _shared_constants(in_features, weight, read, kind, tile.depth)
    constants |= {"ROUTED": routed, "SERVED": served, "ENCODES": hidden == torch.uint8}
    return Configuration(gate_up_kernel, signature, constants, tile.num_warps, tile.num_stages)


@cache
def down_configuration(
    in_features: int,
    weight: torch.dtype,
    hidden: torch.dtype,
    out: torch.dtype,
    *,
    kind: int,
    product: int,
    many_rows: bool,
    routed: bool,
    served: bool,
) -> Configuration:
    """Return the configuration of down."""
    tile = tile_of(kind, product, many_rows=many_rows)
    signature = pointers(
        hidden_ptr=hidden,
        hidden_scale_ptr=torch.uint8,
        down_ptr=weight,
        down_scale_ptr=torch.uint8,
        **_TILE_POINTERS,
        out_ptr=out,
    )
    signature |= dict.fromkeys(("rows", "columns", "scale_rows"), "i64")
    constants = {"K": in_features, "FORMAT": kind, "PRODUCT": product, **tile.constants()}
    constants |= _shared_constants(in_features, weight, hidden, kind, tile.depth)
    constants |= {"ROUTED": routed, "SERVED": served}
    return Configuration(down_kernel, signature, constants, tile.num_warps, tile.num_stages)
