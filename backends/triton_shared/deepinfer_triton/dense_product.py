"""Dense and grouped products with stored weights, K cut into a number of pieces that weights alone decide.

A decode step has few rows: without the cut, a narrow weight would occupy a few of the chip's units. Pieces are added
first to last in a second launch. Steps of many rows without R2 take wider tiles and no cut.

Legend: T rows, G groups, N out features of a group, K in features, p pieces.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.configuration import TYPE_NAMES, Configuration, launch, pointers
from deepinfer_triton.jit import kernel
from deepinfer_triton.row_codes import row_codes
from deepinfer_triton.rows import aligned, alignment_of
from deepinfer_triton.stored_matrices import GROUP, MXFP4, Matrices
from deepinfer_triton.tile_product import CODES, has_long_tile, has_many_rows, product_of, tile_of, tile_product

UNITS = 128
"""Programs that a decode step should have: about the processors of one device."""

LEAST_STEPS = 4
"""Steps of depth that a piece has at least."""

SUM_BLOCK = 1024


@kernel()
def dense_kernel(
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.int64,
    x_group_stride: tl.int64,
    rows: tl.int64,
    columns: tl.int64,
    groups: tl.int64,
    scale_rows: tl.int64,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    X_ALIGNMENT: tl.constexpr,
) -> None:
    """One program a block of rows, a piece of K in a group, and a block of out features."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1) % PIECES
    group = (tl.program_id(1) // PIECES).to(tl.int64)
    column = tl.program_id(2).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = row < rows
    known = column < columns
    x_row = x_ptr + tl.multiple_of(row * x_stride + group * x_group_stride, X_ALIGNMENT)
    x_scale_row = x_scale_ptr + (row * groups + group) * SCALES
    weight_row = weight_ptr + tl.multiple_of((group * columns + column) * ROW_BYTES, ALIGNMENT)
    scale_row = scale_ptr + (group * scale_rows + column // SCALE_ROWS) * SCALES
    product = tile_product(
        x_row, x_scale_row, here, weight_row, scale_row, known, piece * PIECE,
        K, PIECE, FORMAT, PRODUCT, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    out_row = out_ptr + ((piece * rows + row) * groups + group) * columns
    mask = known[:, None] & here[None, :]
    tl.store(out_row[None, :] + column[:, None], product.to(out_ptr.dtype.element_ty), mask=mask)


@kernel()
def piece_sum_kernel(
    partial_ptr: tl.tensor, out_ptr: tl.tensor, count: tl.int64, PIECES: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program a block of elements; every piece holds ``count`` of them."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    total = tl.load(partial_ptr + place, mask=inside, other=0.0)
    for piece in tl.static_range(1, PIECES):
        total += tl.load(partial_ptr + piece * count + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@cache
def pieces_of(in_features: int, out_features: int, groups: int, columns: int, depth: int) -> int:
    """Return into how many equal pieces K is cut: the most that fill the device, none shorter than LEAST_STEPS."""
    if in_features % depth:
        return 1
    steps, tiles = in_features // depth, groups * -(-out_features // columns)
    most = max(1, min(UNITS // tiles, steps // LEAST_STEPS))
    return max(pieces for pieces in range(1, most + 1) if steps % pieces == 0)


@cache
def configuration(
    in_features: int,
    weight: torch.dtype,
    x: torch.dtype,
    out: torch.dtype,
    *,
    kind: int,
    product: int,
    pieces: int,
    many_rows: bool,
) -> Configuration:
    """Return the configuration for weights of one width and format; ``pieces`` of K are stored apart in float32."""
    tile = tile_of(kind, product, many_rows=many_rows)
    signature = pointers(
        x_ptr=torch.uint8 if product == CODES else x,
        x_scale_ptr=torch.uint8,
        weight_ptr=weight,
        scale_ptr=torch.uint8,
        out_ptr=torch.float32 if pieces > 1 else out,
    )
    numbers = ("x_stride", "x_group_stride", "rows", "columns", "groups", "scale_rows")
    width = in_features // 2 if kind == MXFP4 else in_features
    constants = {
        "K": in_features,
        "FORMAT": kind,
        "PRODUCT": product,
        **tile.constants(),
        "PIECE": -(-in_features // (pieces * tile.depth)) * tile.depth,
        "PIECES": pieces,
        "ROW_BYTES": width,
        "SCALES": -(-in_features // GROUP),
        "SCALE_ROWS": 1 if kind == MXFP4 else GROUP,
        "ALIGNMENT": alignment_of(width, weight),
        "X_ALIGNMENT": alignment_of(in_features, torch.uint8 if product == CODES else x),
    }
    signature |= dict.fromkeys(numbers, "i64")
    # A pipeline that is deeper than its loop is long is unrolled into nothing but registers.
    num_stages = min(tile.num_stages, constants["PIECE"] // tile.depth)
    return Configuration(dense_kernel, signature, constants, tile.num_warps, num_stages)


@cache
def sum_configuration(pieces: int, out: torch.dtype) -> Configuration:
    """Return the configuration that adds pieces."""
    signature = {"partial_ptr": "*fp32", "out_ptr": f"*{TYPE_NAMES[out]}", "count": "i64"}
    return Configuration(piece_sum_kernel, signature, {"PIECES": pieces, "BLOCK": SUM_BLOCK})


def dense_product(x_TGK: Tensor, matrices: Matrices, out: torch.dtype, *, quantises: bool, invariant: bool) -> Tensor:
    """Return ``x[t, g] @ W_g^T`` [T, G, N] in one dtype.

    Args:
        x_TGK: float32 or bfloat16 rows.
        matrices: one matrix a group.
        out: dtype of the result.
        quantises: quantise rows of quantised weights first (served numerics).
        invariant: keep R2.
    """
    matrices.move(x_TGK.device)
    rows, groups, in_features = x_TGK.shape
    out_features = matrices.out_features
    product = product_of(matrices, x_TGK.dtype, quantises=quantises)
    many_rows = has_long_tile(matrices.format, product) and has_many_rows(rows, invariant=invariant)
    tile = tile_of(matrices.format, product, many_rows=many_rows)
    pieces = 1 if many_rows else pieces_of(in_features, out_features, groups, tile.columns, tile.depth)
    out_TGN = torch.empty((rows, groups, out_features), dtype=out, device=x_TGK.device)
    if out_TGN.numel() == 0:
        return out_TGN
    if product == CODES:
        codes = row_codes(x_TGK)
        x, x_scales, strides = codes.codes_nK, codes.scales_nG, (groups * in_features, in_features)
    else:
        x, x_scales = aligned(x_TGK), torch.empty(0, dtype=torch.uint8, device=x_TGK.device)
        strides = (x.stride(0), x.stride(1) if groups > 1 else 0)
    chosen = configuration(
        in_features,
        matrices.values.dtype,
        x_TGK.dtype,
        out,
        kind=matrices.format,
        product=product,
        pieces=pieces,
        many_rows=many_rows,
    )
    sums = out_TGN
    if pieces > 1:
        sums = torch.empty((pieces, rows, groups, out_features), dtype=torch.float32, device=x_TGK.device)
    launch(
        chosen,
        (-(-rows // tile.rows), groups * pieces, -(-out_features // tile.columns)),
        x,
        x_scales,
        matrices.values,
        matrices.scales,
        sums,
        *strides,
        rows,
        out_features,
        groups,
        matrices.scales.shape[1] if matrices.is_quantised else 0,
    )
    if pieces > 1:
        count = out_TGN.numel()
        launch(sum_configuration(pieces, out), (-(-count // SUM_BLOCK),), sums, out_TGN, count)
    return out_TGN
