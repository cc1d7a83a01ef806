"""Rows as kernels read them: consecutive values from aligned addresses, or a copy that has both."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16


def alignment_of(width: int, dtype: torch.dtype) -> int:
    """Return how many elements every row's start is a multiple of, when rows of ``width`` lie one behind the other."""
    return math.gcd(ALIGNMENT_BYTES // dtype.itemsize, width)


def aligned(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy of it if its address or strides would make a kernel read it in another way.

    The result's last dimension is consecutive, its address a multiple of 16 bytes, and every other stride a multiple of
    :func:`alignment_of` its width: what holds for a contiguous tensor of that width holds for it.
    """
    step = alignment_of(x.shape[-1], x.dtype)
    # Allocations themselves are aligned on every device, so that the offset says it, for fake tensors as well.
    fits = x.storage_offset() * x.dtype.itemsize % ALIGNMENT_BYTES == 0 and (x.shape[-1] == 1 or x.stride(-1) == 1)
    if fits and all(x.stride(axis) % step == 0 for axis in range(x.dim() - 1) if x.shape[axis] > 1):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def flat_rows(x: Tensor) -> Tensor:
    """Return ``x [..., width]`` as aligned rows [n, width]; leading dimensions are merged."""
    return aligned(x.reshape(-1, x.shape[-1]))


def consecutive(x: Tensor) -> Tensor:
    """Return indices or weights one behind the other, bool as bytes; copies only what lies apart."""
    x = x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x


class Words(NamedTuple):
    """Tensors of bytes, viewed as words of the largest size that all of them allow."""

    views: tuple[Tensor, ...]
    width: int


_WORDS = ((torch.int32, 4), (torch.int16, 2))


def as_words(*tensors: Tensor) -> Words:
    """Return byte tensors [..., b] of equal b as words; their last dimension must be consecutive.

    Words of four bytes at most: larger ones gain nothing where a warp or a vector unit reads many side by side, and
    not every vector unit knows 64-bit words.
    """
    width = tensors[0].shape[-1]
    for dtype, size in _WORDS:
        numbers = [width, *(x.storage_offset() for x in tensors)]
        numbers += [x.stride(axis) for x in tensors for axis in range(x.dim() - 1)]
        if all(number % size == 0 for number in numbers):
            return Words(tuple(x.view(dtype) for x in tensors), width // size)
    return Words(tensors, width)
