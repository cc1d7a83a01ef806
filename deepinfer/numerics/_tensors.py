"""Checks and views that every codec of this package shares."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.errors import ArgumentError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def as_float32(x: Tensor, what: str) -> Tensor:
    """Returns ``x`` in float32, the one dtype in which codecs calculate.

    bfloat16 converts exactly; float64 is rounded to float32 first, so a float64 value is rounded twice.

    Raises:
        ArgumentError: if ``x`` is not float32, bfloat16 or float64.
    """
    if x.dtype not in FLOAT_DTYPES:
        raise ArgumentError(what, [f"input dtype is {x.dtype}; give one of {', '.join(map(str, FLOAT_DTYPES))}"])
    return x.to(torch.float32)


def as_uint8(codes: Tensor, what: str, *also: torch.dtype) -> Tensor:
    """Returns one-byte ``codes`` as a uint8 view on the same memory.

    Raises:
        ArgumentError: if the dtype is neither uint8 nor one of the one-byte dtypes ``also``.
    """
    if codes.dtype == torch.uint8:
        return codes
    if codes.dtype not in also:
        accepted = ", ".join(str(dtype) for dtype in (torch.uint8, *also))
        raise ArgumentError(what, [f"code dtype is {codes.dtype}; give one of {accepted}"])
    return codes.view(torch.uint8)


def by_table(table: Tensor, codes: Tensor) -> Tensor:
    """Returns ``table[codes]``, new, for uint8 ``codes`` of any shape and strides and a table of 256 entries.

    For the processor only: there a look-up of four bytes or more is several times quicker than a cast of a code.
    """
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def split_blocks(x: Tensor, group: int, what: str) -> Tensor:
    """Returns the view ``[..., width / group, group]`` of ``x [..., width]``.

    Raises:
        ArgumentError: if ``x`` has no dimension, ``group`` is not positive, or the width is no multiple of it.
    """
    if group <= 0:
        raise ArgumentError(what, [f"group is {group}; give a positive number of elements per scale"])
    if x.dim() == 0:
        raise ArgumentError(what, ["input has no dimension; give at least [width]"])
    width = x.shape[-1]
    if width % group:
        raise ArgumentError(what, [f"width {width} is not a multiple of {group}; pad the last dimension"])
    return x.view(*x.shape[:-1], width // group, group)


def check_scales(scales: Tensor, blocks: Tensor, what: str) -> None:
    """Refuses scales that are not exactly one per block of ``blocks [..., n, group]``.

    Raises:
        ArgumentError: if the shapes do not fit.
    """
    if scales.shape != blocks.shape[:-1]:
        problem = f"scales have shape {tuple(scales.shape)}; these elements need {tuple(blocks.shape[:-1])}"
        raise ArgumentError(what, [problem])
