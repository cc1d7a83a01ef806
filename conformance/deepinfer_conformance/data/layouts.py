"""Tensors with their strides: copies that keep pitch, offset and stride 0, and views that provoke mistakes."""

from __future__ import annotations

import torch

_EDGE = 3
"""Elements before and behind a pitched view, so that its offset is odd."""


def span(tensor: torch.Tensor) -> int:
    """Return the number of storage elements between the first and the last element of a tensor."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on ``device`` with the same strides and offset, the bytes between elements included."""
    if tensor.numel() == 0 or (tensor.is_contiguous() and tensor.storage_offset() == 0):
        return tensor.detach().to(device, copy=True)
    length = tensor.storage_offset() + span(tensor)
    base = torch.as_strided(tensor, (length,), (1,), 0).to(device, copy=True)
    return torch.as_strided(base, tensor.shape, tensor.stride(), tensor.storage_offset())


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values in another dtype; a dimension of stride 0 stays one in memory."""
    sizes = tensor.shape
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and sizes[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor.to(dtype).expand(sizes)


def pitched(tensor: torch.Tensor, filler: float | int) -> torch.Tensor:
    """Return the same values in a wider, offset tensor whose other elements hold ``filler``."""
    if tensor.dim() == 0:
        return tensor
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 2 * _EDGE), filler, dtype=tensor.dtype)
    view = wide[..., _EDGE : _EDGE + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with the last two dimensions exchanged in memory (column-major)."""
    if tensor.dim() < 2:
        return tensor
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor: which elements have equal bits (NaN equals itself, -0 differs from +0)."""
    return bits(left) == bits(right)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bits as integers of the same shape."""
    if not tensor.dtype.is_floating_point:
        return tensor
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.contiguous().view(integer)
