"""The product of a tile of a weight matrix with a few rows: what dense layers and experts share.

Weights are the left operand (128 rows of it, what block-scaled matrix units want) and activations the right one, so
that a decode step of few rows fills a matrix unit. Three ways, chosen by formats and options alone:

* CODES: weight codes times e4m3 activation codes, scales applied by the matrix unit;
* BFLOAT16: weights that are exact in bfloat16, times bfloat16 rows;
* FLOAT32: everything widened to float32, products exact, no matrix unit.

Each output is a sum of its own along K, in steps of DEPTH, first to last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from deepinfer_triton.jit import device_function
from deepinfer_triton.number_formats import e2m1_value, e4m3_value, e8m0_value
from deepinfer_triton.stored_matrices import FLOAT, FP8, GROUP, MXFP4, Matrices

CODES, BFLOAT16, FLOAT32 = 0, 1, 2

_FLOAT = tl.constexpr(FLOAT)
_FP8 = tl.constexpr(FP8)
_MXFP4 = tl.constexpr(MXFP4)
_GROUP = tl.constexpr(GROUP)
_CODES = tl.constexpr(CODES)
_BFLOAT16 = tl.constexpr(BFLOAT16)
_ONE = tl.constexpr(127)

FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile: in decode and whenever R2 is asked for, and in longer steps without it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Extents of a tile and how its loop is compiled."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int | bool]:
        """Return the constants that every kernel with tiles has."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth}


_TILES = {
    CODES: Tile(FEW_ROWS, 128, 128, 4, 4),
    BFLOAT16: Tile(FEW_ROWS, 128, 64, 4, 4),
    FLOAT32: Tile(FEW_ROWS, 64, 32, 8, 2),
}
# Four bits become bfloat16 in registers: those of a longer tile, or of fewer warps, are not enough.
_DECODED_TILE = Tile(FEW_ROWS, 128, 32, 8, 4)
_LONG_TILES = {CODES: Tile(MANY_ROWS, 128, 128, 8, 3), BFLOAT16: Tile(MANY_ROWS, 128, 64, 8, 3)}


def has_long_tile(kind: int, product: int) -> bool:
    """Whether tiles of many rows exist: not where codes are decoded by the program itself, which then spills."""
    return product == CODES or (product == BFLOAT16 and kind == FLOAT)


def tile_of(kind: int, product: int, *, many_rows: bool) -> Tile:
    """Return the tile of a format and a way to multiply it; ``many_rows`` only where :func:`has_long_tile` says so."""
    if many_rows:
        return _LONG_TILES[product]
    return _DECODED_TILE if kind == MXFP4 and product == BFLOAT16 else _TILES[product]


def has_many_rows(rows: int, *, invariant: bool) -> bool:
    """Whether a step is worth tiles of many rows; never where a row's bits must not depend on its batch."""
    return rows > FEW_ROWS and not invariant


def product_of(matrices: Matrices, x_dtype: torch.dtype, *, quantises: bool) -> int:
    """Return the way to multiply; ``quantises`` says that rows of quantised weights are quantised as well."""
    if quantises and matrices.is_quantised:
        return CODES
    return BFLOAT16 if matrices.fits_bfloat16 and x_dtype == torch.bfloat16 else FLOAT32


@device_function
def weight_codes(
    weight_row: tl.tensor,
    known: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """Return bytes of a tile's codes, two e2m1 codes a byte."""
    PACKED: tl.constexpr = 2 if FORMAT == _MXFP4 else 1
    place = start // PACKED + tl.arange(0, DEPTH // PACKED)
    mask = known[:, None]
    if K % DEPTH != 0:
        mask = mask & (place < K // PACKED)[None, :]
    return tl.load(weight_row[:, None] + place[None, :], mask=mask, other=0)


@device_function
def weight_values(
    weight_row: tl.tensor,
    scale_row: tl.tensor,
    known: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """Return a tile's values: as stored, or float32 for codes."""
    k = start + tl.arange(0, DEPTH)
    mask = known[:, None] & (k < K)[None, :]
    if FORMAT == _FLOAT:
        value = tl.load(weight_row[:, None] + k[None, :], mask=mask, other=0.0)
    else:
        if FORMAT == _FP8:
            code = tl.load(weight_row[:, None] + k[None, :], mask=mask, other=0).to(tl.int32)
            element = e4m3_value(code)
        else:
            pair = tl.load(weight_row[:, None] + (k // 2)[None, :], mask=mask, other=0).to(tl.int32)
            element = e2m1_value(pair >> ((k % 2) * 4)[None, :])
        group = start // _GROUP + tl.arange(0, DEPTH // _GROUP)
        real = known[:, None] & (group * _GROUP < K)[None, :]
        scale = e8m0_value(tl.load(scale_row[:, None] + group[None, :], mask=real, other=_ONE).to(tl.int32))
        grouped = tl.reshape(element, (COLUMNS, DEPTH // _GROUP, _GROUP)) * scale[:, :, None]
        value = tl.reshape(grouped, (COLUMNS, DEPTH))
    return value


@device_function
def tile_product(
    x_row: tl.tensor,
    x_scale_row: tl.tensor,
    here: tl.tensor,
    weight_row: tl.tensor,
    scale_row: tl.tensor,
    known: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    PIECE: tl.constexpr,
    FORMAT: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """Return float32 [COLUMNS, ROWS]: out features by rows, over the piece of K that starts at ``first``.

    ``x_row``, ``weight_row`` and the scales' pointers are those of the first element of each row.
    """
    product = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(0, PIECE, DEPTH):
        start = first + step
        k = start + tl.arange(0, DEPTH)
        mask = here[:, None]
        if K % DEPTH != 0:
            mask = mask & (k < K)[None, :]
        if PRODUCT == _CODES:
            x = tl.load(x_row[:, None] + k[None, :], mask=mask, other=0)
            weight = weight_codes(weight_row, known, start, K, FORMAT, DEPTH)
            group = start // _GROUP + tl.arange(0, DEPTH // _GROUP)
            real = (group * _GROUP < K)[None, :]
            x_scale = tl.load(x_scale_row[:, None] + group[None, :], mask=here[:, None] & real, other=_ONE)
            scale = tl.load(scale_row[:, None] + group[None, :], mask=known[:, None] & real, other=_ONE)
            turned = tl.trans(x)
            if FORMAT == _FP8:
                product = tl.dot_scaled(weight, scale, "e4m3", turned, x_scale, "e4m3", product)
            else:
                product = tl.dot_scaled(weight, scale, "e2m1", turned, x_scale, "e4m3", product)
        else:
            x = tl.load(x_row[:, None] + k[None, :], mask=mask, other=0.0)
            weight = weight_values(weight_row, scale_row, known, start, K, FORMAT, COLUMNS, DEPTH)
            if PRODUCT == _BFLOAT16:
                product = tl.dot(weight.to(tl.bfloat16), tl.trans(x), product)
            else:
                turned = tl.trans(x.to(tl.float32))
                product = tl.dot(weight.to(tl.float32), turned, product, input_precision="ieee")
    return product
