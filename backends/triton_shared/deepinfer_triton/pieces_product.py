"""Products of rows with narrow float weights, in float32, K cut into a fixed number of pieces.

A program multiplies a block of rows with a block of out features over one piece of K, so that a decode step of few rows
still fills the chip. Pieces depend on K alone and are added in ascending order by the kernel that reads them: a row's
bits do not depend on its batch. Each output of a matrix unit is a sum of its own, so that neighbours do not matter.
Rows are the product's columns: few of them fill a matrix unit that way, and all sixteen are summed in one way even by
the host's library in the interpreter, which depends on the row of the left operand.

Legend: T rows, K in features, N out features, p pieces, M stored columns (N, then the sum of squares if wanted).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from deepinfer_triton.configuration import Configuration, launch, pointers, power_of_two
from deepinfer_triton.jit import kernel
from deepinfer_triton.rows import aligned, alignment_of, flat_rows

ROWS = 16
DEPTH = 128
WIDEST_COLUMNS = 64


@kernel()
def pieces_product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    x_stride: tl.int64,
    rows: tl.int64,
    K: tl.constexpr,
    N: tl.constexpr,
    STORED: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDEN: tl.constexpr,
    SQUARES: tl.constexpr,
) -> None:
    """One program a block of rows, a piece of K and a block of out features."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    here = row < rows
    known = column < N
    x_row = x_ptr + tl.multiple_of(row * x_stride, ALIGNMENT)[:, None]
    weight_row = weight_ptr + (column * K)[:, None]
    product = tl.zeros((COLUMNS, ROWS), tl.float32)
    squares = tl.zeros((ROWS, DEPTH), tl.float32)
    for start in range(0, PIECE, DEPTH):
        k = piece * PIECE + start + tl.arange(0, DEPTH)[None, :]
        x = tl.load(x_row + k, mask=here[:, None] & (k < K), other=0.0)
        weight = tl.load(weight_row + k, mask=known[:, None] & (k < K), other=0.0)
        if SQUARES:
            wide = x.to(tl.float32)
            squares += wide * wide
        if WIDEN:
            turned = tl.trans(x.to(tl.float32))
            product = tl.dot(weight.to(tl.float32), turned, product, input_precision="ieee")
        else:
            product = tl.dot(weight, tl.trans(x), product)
    sums = partial_ptr + (row * PIECES + piece) * STORED
    tl.store(sums[None, :] + column[:, None], product, mask=known[:, None] & here[None, :])
    if SQUARES:
        tl.store(sums + N, tl.sum(squares, 1), mask=here)


@cache
def configuration(
    in_features: int, out_features: int, pieces: int, x_dtype: torch.dtype, weight_dtype: torch.dtype, *, squares: bool
) -> Configuration:
    """Return the configuration of a product; ``pieces`` is the largest number of pieces that K is cut into."""
    piece = -(-in_features // (pieces * DEPTH)) * DEPTH
    columns = max(16, min(WIDEST_COLUMNS, power_of_two(out_features)))
    signature = pointers(x_ptr=x_dtype, weight_ptr=weight_dtype, partial_ptr=torch.float32)
    constants = {
        "K": in_features,
        "N": out_features,
        "STORED": out_features + squares,
        "PIECES": -(-in_features // piece),
        "PIECE": piece,
        "ROWS": ROWS,
        "COLUMNS": columns,
        "DEPTH": DEPTH,
        "ALIGNMENT": alignment_of(in_features, x_dtype),
        "WIDEN": not x_dtype == weight_dtype == torch.bfloat16,
        "SQUARES": squares,
    }
    return Configuration(pieces_product_kernel, {**signature, "x_stride": "i64", "rows": "i64"}, constants)


class Pieces(NamedTuple):
    """Partial sums float32 [T, p, M] and the number of pieces."""

    partial_TpM: Tensor
    number: int


def pieces_product(x_TK: Tensor, weight_NK: Tensor, pieces: int, *, squares: bool) -> Pieces:
    """Return partial sums of ``x @ W^T``; with ``squares`` the last column holds those of ``x^2``."""
    x_TK, weight_NK = flat_rows(x_TK), aligned(weight_NK).contiguous()
    rows, in_features = x_TK.shape
    chosen = configuration(in_features, weight_NK.shape[0], pieces, x_TK.dtype, weight_NK.dtype, squares=squares)
    count, stored = int(chosen.constants["PIECES"]), int(chosen.constants["STORED"])
    partial_TpM = torch.empty((rows, count, stored), dtype=torch.float32, device=x_TK.device)
    grid = (-(-rows // ROWS), count, -(-weight_NK.shape[0] // int(chosen.constants["COLUMNS"])))
    launch(chosen, grid, x_TK, weight_NK, partial_TpM, x_TK.stride(0), rows)
    return Pieces(partial_TpM, count)
