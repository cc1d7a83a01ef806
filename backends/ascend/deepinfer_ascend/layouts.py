"""Weight layouts: from the checkpoint's to the operators', once at load, and exactly back.

Every function here moves or re-codes bytes without rounding, on the host, and has its inverse beside it.

* A 32 x 32 block's scale, repeated for its 32 rows, is an MX scale per row per 32 columns: the same values.
* MX scales stand in pairs: [N, K/32] becomes [N, K/64, 2]; an odd last one gets a neighbour of one.
* An e2m1 code is an e4m3 code of the same value, so that mxfp4 can be widened to mxfp8.
* A matrix [N, K] enters npu_quant_matmul as [K, N] with scales [K/64, N, 2], both in plain order of memory.
* NZ: 16 rows by 32 bytes form a tile; tiles stand column by column.

Legend: N out features, K in features, G groups of 32 along K, E experts, R rows, C columns, b bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.weights import StoredWeight
from deepinfer.numerics import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3, pack_nibbles, unpack_nibbles
from deepinfer_ascend.arithmetic import refuse

GROUP: Final = 32
PAIR: Final = 2 * GROUP
ONE_CODE: Final = 127
"""The e8m0 code of 1."""

NZ_ROWS: Final = 16
NZ_BYTES: Final = 32
NZ_FP4_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class MxWeight:
    """A weight with one e8m0 scale per row per 32 columns.

    Attributes:
        codes: uint8 [N, K] e4m3 codes, or [N, K/2] packed e2m1 codes, even column in the low nibble.
        scales_NG: uint8 [N, K/32].
        is_fp4: which of the two.
    """

    codes: Tensor
    scales_NG: Tensor
    is_fp4: bool

    @property
    def in_features(self) -> int:
        """K, padding included."""
        return int(self.codes.shape[-1]) * (2 if self.is_fp4 else 1)


def mx_weight(stored: StoredWeight) -> MxWeight:
    """Return a stored fp8_block32 or mxfp4 weight as MX data, K padded to a multiple of 64 with exact zeros."""
    if stored.scale is None:
        refuse("prepare", f"{stored.name!r} is stored as {stored.format} but has no scale")
    codes, scales = stored.weight.view(torch.uint8), stored.scale.view(torch.uint8)
    is_fp4 = stored.format == "mxfp4"
    rows, columns = stored.out_features, stored.in_features
    per_byte = 2 if is_fp4 else 1
    groups = -(-columns // GROUP)
    needed = (rows, groups) if is_fp4 else (-(-rows // GROUP), groups)
    if tuple(codes.shape) != (rows, columns // per_byte) or tuple(scales.shape) != needed:
        refuse(
            "prepare",
            f"{stored.name!r} holds codes {tuple(codes.shape)} and scales {tuple(scales.shape)}; {stored.format} of "
            f"{rows} x {columns} needs {(rows, columns // per_byte)} and {needed}",
        )
    scales_NG = scales if is_fp4 else rows_of_blocks(scales, rows)
    ragged = -columns % PAIR
    return MxWeight(
        F.pad(codes, (0, ragged // per_byte)).contiguous(),
        F.pad(scales_NG, (0, (columns + ragged) // GROUP - groups), value=ONE_CODE).contiguous(),
        is_fp4,
    )


def rows_of_blocks(scales_BG: Tensor, rows: int) -> Tensor:
    """Return [N, G]: each block row's scales, once for every one of its 32 rows; the last may have fewer."""
    return scales_BG.repeat_interleave(GROUP, dim=0)[:rows]


def blocks_of_rows(scales_NG: Tensor) -> Tensor:
    """Undo :func:`rows_of_blocks`; refuses scales that differ within a block of rows."""
    blocks = scales_NG[::GROUP]
    if not torch.equal(rows_of_blocks(blocks, scales_NG.shape[0]), scales_NG):
        refuse("layout", "scales differ within 32 rows; they do not come from 32 x 32 blocks")
    return blocks


def paired(scales: Tensor) -> Tensor:
    """Return scales [..., G] as pairs [..., ceil(G/2), 2]."""
    even = F.pad(scales, (0, scales.shape[-1] % 2), value=ONE_CODE)
    return torch.unflatten(even, -1, (-1, 2)).contiguous()


def unpaired(pairs: Tensor, groups: int) -> Tensor:
    """Undo :func:`paired` for G = ``groups``."""
    return pairs.flatten(-2)[..., :groups].contiguous()


def widened(weight: MxWeight) -> MxWeight:
    """Return an mxfp4 weight as mxfp8 with the same scales and values."""
    codes = encode_e4m3(decode_e2m1(unpack_nibbles(weight.codes)))
    return MxWeight(codes, weight.scales_NG, is_fp4=False)


def narrowed(weight: MxWeight) -> MxWeight:
    """Undo :func:`widened`; refuses codes that e2m1 does not have."""
    codes = encode_e2m1(decode_e4m3(weight.codes))
    if not torch.equal(encode_e4m3(decode_e2m1(codes)), weight.codes):
        refuse("layout", "the mxfp8 codes hold values that mxfp4 does not have")
    return MxWeight(pack_nibbles(codes), weight.scales_NG, is_fp4=True)


@dataclass(frozen=True, slots=True)
class MatmulOperand:
    """The right side of npu_quant_matmul: codes [..., K, N] and scales [..., K/64, N, 2], both contiguous."""

    codes: Tensor
    scales: Tensor


def matmul_operand(weight: MxWeight) -> MatmulOperand:
    """Return an mxfp8 weight as the operand of a product.

    Both parts are copied into the plain order of memory: with K = 64 a transposed view of the scales has an axis of
    length one, and the operator would take the codes for transposed and the scales for not.
    """
    return MatmulOperand(_turned(weight.codes), _turned(paired(weight.scales_NG)))


def mx_of_operand(operand: MatmulOperand, groups: int) -> MxWeight:
    """Undo :func:`matmul_operand` for G = ``groups``."""
    return MxWeight(_turned(operand.codes), unpaired(_turned(operand.scales), groups), is_fp4=False)


def _turned(x: Tensor) -> Tensor:
    """Return a copy with the first two dimensions exchanged, whose strides are those of a fresh tensor."""
    turned = x.transpose(0, 1)
    fresh = torch.empty(turned.shape, dtype=x.dtype, device=x.device)
    return fresh.copy_(turned)


def to_nz(matrix: Tensor, *, tile_bytes: int = NZ_BYTES) -> Tensor:
    """Return [..., R, C] as NZ tiles [..., C/c, R/16, 16, c] of c columns; R and C must fill whole tiles.

    A row of a tile has 32 bytes, but :data:`NZ_FP4_BYTES` for packed MXFP4 weights of W4A8 products: 32 codes, as many
    as the e4m3 codes that they meet.
    """
    width = tile_bytes // matrix.element_size()
    rows, columns = matrix.shape[-2:]
    if rows % NZ_ROWS or columns % width:
        refuse("layout", f"NZ tiles are {NZ_ROWS} rows by {width} columns; {rows} x {columns} does not fill them")
    tiles = torch.unflatten(torch.unflatten(matrix, -1, (-1, width)), -3, (-1, NZ_ROWS))
    return tiles.movedim(-2, -4).contiguous()


def from_nz(tiles: Tensor) -> Tensor:
    """Undo :func:`to_nz`."""
    return tiles.movedim(-4, -2).flatten(-2).flatten(-3, -2).contiguous()
