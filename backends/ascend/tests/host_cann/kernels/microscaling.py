"""MX formats: e4m3 or packed e2m1 codes with one power of two (e8m0) per 32 along K, stored in pairs [..., K/64, 2].

Legend: T rows, K in features, N out features, E experts, G groups.
"""

# ruff: noqa: FBT001 (booleans stand where the operator has them)

from __future__ import annotations

import torch
from torch import Tensor

from host_cann.errors import KernelError
from host_cann.kernels.registry import KernelTable
from host_cann.views import store

TABLE = KernelTable()
BLOCK = 32
_E4M3_CODE, _E2M1_CODE = 36, 40
_EMAX = {_E4M3_CODE: 8, _E2M1_CODE: 2}
_LARGEST = {_E4M3_CODE: 448.0, _E2M1_CODE: 6.0}
_E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_E2M1_EDGES = (_E2M1_VALUES[1:] + _E2M1_VALUES[:-1]) / 2


def e2m1_values(codes: Tensor, dim: int) -> Tensor:
    """Return the values of packed codes; the even element of a pair lies in the low half of the byte along ``dim``."""
    last = codes.movedim(dim, -1)
    nibbles = torch.stack((last & 15, last >> 4), dim=-1).flatten(-2).movedim(-1, dim)
    magnitude = _E2M1_VALUES[(nibbles & 7).long()]
    return torch.where(nibbles > 7, -magnitude, magnitude).float()


def e2m1_codes(x: Tensor) -> Tensor:
    """Return packed codes of the nearest values, ties to the even code, saturated, pairs along the last dimension."""
    magnitude = x.double().abs()
    above = torch.bucketize(magnitude, _E2M1_EDGES, right=False)  # a tie stays below
    tie = (above < 7) & (magnitude == torch.cat((_E2M1_EDGES, _E2M1_EDGES[-1:]))[above])
    code = torch.where(tie & (above % 2 == 1), above + 1, above)
    nibbles = (code + torch.where(torch.signbit(x), 8, 0)).to(torch.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def scales_along_k(scales: Tensor, pairs_dim: int, what: str) -> Tensor:
    """Return float scales with the pairs joined where K/64 stood: [..., K/64, ..., 2] -> [..., K/32, ...]."""
    if scales.dtype == torch.uint8:
        values = torch.exp2(scales.float() - 127)
    elif scales.dtype == torch.float8_e8m0fnu:
        values = scales.float()
    else:
        raise KernelError(f"{what} is {scales.dtype}; MX scales are e8m0")
    if scales.shape[-1] != 2:
        raise KernelError(f"{what} has shape {tuple(scales.shape)}; MX scales come in pairs in the last dimension")
    moved = values.movedim(-1, pairs_dim + 1)
    return moved.flatten(pairs_dim, pairs_dim + 1)


def spread(scales: Tensor, dim: int, size: int, what: str) -> Tensor:
    """Return each scale for its 32 elements along ``dim``."""
    wide = scales.repeat_interleave(BLOCK, dim)
    if not size <= wide.shape[dim] < size + 2 * BLOCK:
        raise KernelError(f"{what} covers {wide.shape[dim]} elements along K, which has {size}")
    return wide.narrow(dim, 0, size)


def values_of(codes: Tensor, scales: Tensor, dim: int, what: str, *, packed: bool) -> Tensor:
    """Return float32 values of MX data, K along ``dim`` (counted from the front)."""
    if packed:
        plain = e2m1_values(codes, dim)
    elif codes.dtype == torch.float8_e4m3fn:
        plain = codes.float()
    else:
        raise KernelError(f"{what} is {codes.dtype}; give e4m3 or packed e2m1 codes")
    return plain * spread(scales_along_k(scales, dim, f"{what} scales"), dim, plain.shape[dim], f"{what} scales")


@TABLE.add(
    "aclnnDynamicMxQuantV3(x, int axis, text round_mode, int dtype, int block, int scale_rule, double largest,"
    " double low_bound, y*, scale*)"
)
def dynamic_mx_quant(
    x: Tensor, axis: int, round_mode: str, dtype: int, block: int, scale_rule: int, largest: float, low_bound: float,
    y: Tensor, scale: Tensor,
) -> None:  # fmt: skip
    if axis not in (-1, x.dim() - 1) or round_mode != "rint" or block != BLOCK or dtype not in _EMAX or largest:
        raise KernelError(
            f"is emulated along the last axis, in blocks of {BLOCK}, rounding 'rint', to e4m3 or e2m1; asked: axis "
            f"{axis}, blocks of {block}, {round_mode!r}, dtype {dtype}, largest value {largest}"
        )
    columns = x.shape[-1]
    wide = torch.unflatten(torch.nn.functional.pad(x.float(), (0, -columns % BLOCK)), -1, (-1, BLOCK))
    highest = wide.abs().amax(-1).double().clamp(min=low_bound)
    if scale_rule == 0:  # OCP: the exponent of the largest, less the format's largest exponent
        exponent = torch.floor(torch.log2(highest)) - _EMAX[dtype]
    elif scale_rule == 1 and dtype == _E4M3_CODE:  # the least power of two with which nothing saturates
        mantissa, power = torch.frexp(highest.float() / _LARGEST[dtype])
        exponent = torch.where(mantissa == 0.5, power - 1, power).double()
    else:
        raise KernelError(f"has no scale rule {scale_rule} for dtype {dtype} here; 0 (OCP), or 1 for e4m3")
    exponent = exponent.clamp(-127, 127)  # NaN stays
    scaled = (wide.double() / torch.exp2(exponent).unsqueeze(-1)).float().flatten(-2)[..., :columns]
    if dtype == _E4M3_CODE:
        store(y, scaled.clamp(-448, 448).to(torch.float8_e4m3fn))
    else:
        store(y, e2m1_codes(scaled))
    codes = torch.where(exponent.isnan(), 255, exponent + 127).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, exponent.shape[-1] % 2))
    store(scale.view(torch.uint8), torch.unflatten(codes, -1, (-1, 2)))


@TABLE.add(
    "aclnnQuantMatmulV5(x1, x2, x1_scale?, x2_scale, y_scale?, x1_offset?, x2_offset?, y_offset?, bias?,"
    " bool turn_x1, bool turn_x2, int group, out*)"
)
def quant_matmul(
    x1: Tensor, x2: Tensor, x1_scale: Tensor | None, x2_scale: Tensor, y_scale: Tensor | None, x1_offset: Tensor | None,
    x2_offset: Tensor | None, y_offset: Tensor | None, bias: Tensor | None, turn_x1: bool, turn_x2: bool, group: int,
    out: Tensor,
) -> None:  # fmt: skip
    extras = [extra for extra in (y_scale, x1_offset, x2_offset, y_offset, bias) if extra is not None and extra.numel()]
    # Three 16-bit sizes in one word: rows, columns, K.
    sizes = (group >> 32 & 0xFFFF, group >> 16 & 0xFFFF, group & 0xFFFF)
    if extras or turn_x1 or turn_x2 or x1_scale is None or sizes != (1, 1, BLOCK):
        raise KernelError(
            f"is emulated for MX operands with groups (1, 1, {BLOCK}), without offsets and bias; got {sizes}"
        )
    packed = x1.dtype == torch.uint8
    left = values_of(x1, x1_scale, 1, "x1", packed=packed)
    right = values_of(x2, x2_scale, 0, "x2", packed=packed)
    store(out, left @ right)


@TABLE.add(
    "aclnnTransposeQuantBatchMatMul(x1, x2, bias?, x1_scale, x2_scale, int32 dtype, int32 group, ints turn_x1,"
    " ints turn_x2, ints turn_y, int32 split, out*)"
)
def transpose_quant_matmul(
    x1: Tensor, x2: Tensor, bias: Tensor | None, x1_scale: Tensor, x2_scale: Tensor, dtype: int, group: int,
    turn_x1: list[int], turn_x2: list[int], turn_y: list[int], split: int, out: Tensor,
) -> None:  # fmt: skip
    if bias is not None or group != BLOCK or split != 1 or x1_scale.dtype == torch.uint8:
        raise KernelError(
            f"is emulated for MX operands in groups of {BLOCK} with e8m0 scales; got groups of {group}, scales "
            f"{x1_scale.dtype}"
        )
    left = values_of(x1, x1_scale, 2, "x1", packed=False).permute(turn_x1)
    right = values_of(x2, x2_scale, 1, "x2", packed=False).permute(turn_x2)
    store(out, (left @ right).permute(turn_y))


@TABLE.add("aclnnNpuFormatCast(x, tiles!*)")
def format_cast(x: Tensor, tiles: Tensor) -> None:
    """ND to FRACTAL_NZ: [.., R, C] as [.., C/c, R/16, 16, c]; two packed codes are one byte of either side."""
    rows, width = tiles.shape[-2:]
    if x.shape[-2] % rows or x.shape[-1] % width:
        raise KernelError(f"is emulated for whole tiles of {rows} x {width}; {tuple(x.shape)} is padded on the chip")
    apart = torch.unflatten(torch.unflatten(x, -1, (-1, width)), -3, (-1, rows))
    store(tiles, apart.movedim(-2, -4))
