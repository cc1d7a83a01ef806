"""Device memory as torch CPU tensors."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from host_cann.descriptors import Argument, TensorArgument
from host_cann.errors import KernelError
from host_cann.formats import DTYPES, PLAIN_FORMATS

if TYPE_CHECKING:
    from torch import Tensor

_RANGE_BYTES = 1 << 43


class DeviceMemory:
    """Views of device memory that were checked against the allocation they lie in."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._check = library.host_cann_check_device_range
        self._check.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_char_p]
        self._start = 0
        self._whole: dict[torch.dtype, Tensor] = {}

    def view(self, argument: TensorArgument, device: int, what: str) -> Tensor:
        """Return the strided view that ``argument`` describes; two elements a byte come as uint8 bytes.

        Raises:
            KernelError: the view leaves its allocation, or its layout is not a plain one.
        """
        if argument.format not in PLAIN_FORMATS:
            raise KernelError(f"{what} has format {argument.format}, which this kernel does not read")
        dtype = DTYPES.get(argument.acl_dtype, torch.uint8)
        shape, strides, offset = argument.shape, argument.strides, argument.offset
        if argument.is_packed:
            shape, strides, offset = _bytes_of_pairs(argument, what)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device="cpu")
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        width = dtype.itemsize
        first = argument.address + offset * width
        # The address reaches the library as it is: a null or host pointer is refused there.
        if self._check(first, extent * width, device, what.encode()):
            raise MemoryRefusedError
        start = first - self._origin(first)
        if start % width:
            raise KernelError(f"{what} at {first:#x} is not aligned to its {width} bytes")
        return self._typed(dtype).as_strided(shape, strides, start // width)

    def _origin(self, address: int) -> int:
        if not self._start:
            self._start = address // _RANGE_BYTES * _RANGE_BYTES
        return self._start

    def _typed(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._whole:
            window = (ctypes.c_char * (2 * _RANGE_BYTES)).from_address(self._start)
            # Kept for later calls, which may come from outside the inference mode of this one.
            with torch.inference_mode(mode=False):
                self._whole[dtype] = torch.frombuffer(window, dtype=torch.uint8).view(dtype)
        return self._whole[dtype]


def as_stored(value: Argument) -> Argument:
    """Return a tensor's storage as a tensor of its own: contiguous, in storage shape."""
    if not isinstance(value, TensorArgument):
        return value
    strides = [1]
    for size in reversed(value.storage_shape[1:]):
        strides.insert(0, strides[0] * size)
    return replace(value, shape=value.storage_shape, strides=tuple(strides), offset=0, format="ND")


class MemoryRefusedError(Exception):
    """The library has the reason."""


def _bytes_of_pairs(argument: TensorArgument, what: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides and offset in bytes; the elements lie in pairs along the dimension of stride 1."""
    along = [i for i, stride in enumerate(argument.strides) if stride == 1 and argument.shape[i] > 1]
    if len(along) != 1 or argument.shape[along[0]] % 2 or argument.offset % 2:
        raise KernelError(
            f"{what}: {argument.dtype} of shape {argument.shape}, strides {argument.strides} has no pairs"
        )
    shape = tuple(size // 2 if i == along[0] else size for i, size in enumerate(argument.shape))
    strides = tuple(stride if i == along[0] else stride // 2 for i, stride in enumerate(argument.strides))
    return shape, strides, argument.offset // 2


def store(out: Tensor, value: Tensor) -> None:
    """Write a result; its shape must be the one that torch_npu allotted."""
    if out.shape != value.shape:
        raise KernelError(f"the operator computes {tuple(value.shape)}, but {tuple(out.shape)} was allotted")
    out.copy_(value)
