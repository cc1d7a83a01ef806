"""Stored weights into matrices that a product can use: dequantised once, exactly.

Legend: N out features, K in features, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.weights import PreparedWeight, StoredWeight
from deepinfer.errors import ArgumentError
from deepinfer.numerics import dequantise_fp8_weight, dequantise_mxfp4_weight
from deepinfer_cpu_ref.computation import Computation, quantised_input, refuse
from deepinfer_cpu_ref.invariant import pad_width, padded_product

QUANTISED_FORMATS = ("fp8_block32", "mxfp4")


@dataclass(eq=False)
class Matrix:
    """One weight ready for products.

    Attributes:
        weight_NK: the matrix; N is padded when the computation is invariant.
        out_features: N without padding.
        quantises_input: the input is to pass through the fp8 activation codec first.
    """

    weight_NK: Tensor
    out_features: int
    quantises_input: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.weight_NK.numel() * self.weight_NK.element_size()

    def product(self, x_TK: Tensor, *, invariant: bool) -> Tensor:
        """Return ``x @ W^T`` [T, N] in the matrix's dtype; the weight moves to the device of its first input."""
        if self.weight_NK.device != x_TK.device:
            self.weight_NK = self.weight_NK.to(x_TK.device)
        x_TK = x_TK.to(self.weight_NK.dtype)
        if invariant:
            return padded_product(x_TK, self.weight_NK, self.out_features)
        return torch.nn.functional.linear(x_TK, self.weight_NK)

    def quantised(self, x: Tensor) -> Tensor:
        """Return ``x`` as the product is to see it."""
        return quantised_input(x) if self.quantises_input else x


@dataclass(eq=False)
class PreparedMatrices(PreparedWeight):
    """One matrix per group, all of one shape, and the dtype of their results."""

    name: str
    nbytes: int
    groups: tuple[Matrix, ...]
    in_features: int
    out_dtype: torch.dtype


def make_matrix(weight_NK: Tensor, *, quantised: bool, dtype: torch.dtype, computation: Computation) -> Matrix:
    """Return the matrix for products in ``dtype``, or in the wide dtype where ``dtype`` would round the weight.

    Args:
        weight_NK: dequantised weight.
        quantised: the stored format is a quantised one.
        dtype: the dtype wanted for the product.
        computation: the engine's arithmetic.
    """
    matrix_NK = weight_NK.to(dtype)
    if dtype != computation.wide and not torch.equal(matrix_NK.to(weight_NK.dtype), weight_NK):
        matrix_NK = weight_NK.to(computation.wide)
    out_features = matrix_NK.shape[0]
    if computation.invariant:
        matrix_NK = pad_width(matrix_NK)
    return Matrix(matrix_NK.contiguous(), out_features, quantises_input=quantised and computation.served)


def dequantise(stored: StoredWeight) -> Tensor:
    """Return [N, K] with the exact values of a stored weight: float32, or bfloat16 where it is stored so."""
    if stored.format == "engram_fp8":
        refuse("prepare", f"{stored.name!r} is an Engram table; tables are looked up by 'memory.gather_rows'")
    if stored.format in QUANTISED_FORMATS:
        if stored.scale is None:
            refuse("prepare", f"{stored.name!r} is stored as {stored.format} but has no scale")
        decode = dequantise_fp8_weight if stored.format == "fp8_block32" else dequantise_mxfp4_weight
        try:
            weight_NK = decode(stored.weight, stored.scale)
        except ArgumentError as error:
            refuse("prepare", f"{stored.name!r} does not hold {stored.format} data: {'; '.join(error.problems)}")
    else:
        weight_NK = stored.weight
    if tuple(weight_NK.shape) != (stored.out_features, stored.in_features):
        refuse(
            "prepare",
            f"{stored.name!r} decodes to {tuple(weight_NK.shape)}; "
            f"its out and in features say {(stored.out_features, stored.in_features)}",
        )
    return weight_NK
