"""Reads the descriptors of native/operators.cpp into frozen values."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from host_cann.formats import DTYPES, FORMATS, PACKED_NAMES, dtype_name

_MAX_DIMENSIONS = 16
_TENSOR = struct.Struct(f"={1 + 2 * _MAX_DIMENSIONS + 3}qQ{1 + _MAX_DIMENSIONS}q")
_ARRAY = struct.Struct("=qQQQ")
_SCALAR = struct.Struct("=q16s")
_SCALAR_FORMATS = {
    0: "=f", 1: "=e", 2: "=b", 3: "=i", 4: "=B", 6: "=h", 7: "=H", 8: "=I", 9: "=q", 10: "=Q", 11: "=d", 12: "=?",
}  # fmt: skip
_BF16 = 27


class DescriptorKind(IntEnum):
    """Kinds of native/operators.cpp."""

    NOTHING = 0
    TENSOR = 1
    TENSOR_LIST = 2
    INTEGERS = 3
    BOOLEANS = 4
    FLOATS = 5
    SCALAR = 6
    SCALAR_LIST = 7


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor as the operator sees it; strides and offset count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str
    format: str
    storage_shape: tuple[int, ...]
    address: int
    acl_dtype: int
    handle: int = field(default=0, repr=False, compare=False)

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two elements."""
        return self.acl_dtype in PACKED_NAMES

    @property
    def element_bytes(self) -> int:
        """Bytes of an element; 1 for types that torch does not know or packs."""
        return DTYPES[self.acl_dtype].itemsize if self.acl_dtype in DTYPES else 1

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """A host scalar and the type under which it was passed."""

    value: float | int | bool
    dtype: str


Item: TypeAlias = TensorArgument | ScalarArgument | int | float | bool | None
Argument: TypeAlias = Item | str | tuple[Item, ...]


def read_tensor(address: int) -> TensorArgument:
    """Return the tensor descriptor at ``address``."""
    words = _TENSOR.unpack(ctypes.string_at(address, _TENSOR.size))
    dimensions = words[0]
    strides_at, offset_at = 1 + _MAX_DIMENSIONS, 1 + 2 * _MAX_DIMENSIONS
    offset, dtype, layout, data, storage_dimensions = words[offset_at : offset_at + 5]
    storage_at = offset_at + 5
    return TensorArgument(
        shape=words[1 : 1 + dimensions],
        strides=words[strides_at : strides_at + dimensions],
        offset=offset,
        dtype=dtype_name(dtype),
        format=FORMATS.get(layout, str(layout)),
        storage_shape=words[storage_at : storage_at + storage_dimensions],
        address=data,
        acl_dtype=dtype,
        handle=address,
    )


def read_scalar(address: int) -> ScalarArgument:
    """Return the scalar descriptor at ``address``."""
    dtype, raw = _SCALAR.unpack(ctypes.string_at(address, _SCALAR.size))
    if dtype == _BF16:
        value = struct.unpack("<f", b"\0\0" + raw[:2])[0]
    elif dtype in _SCALAR_FORMATS:
        layout = struct.Struct(_SCALAR_FORMATS[dtype])
        value = layout.unpack(raw[: layout.size])[0]
    else:
        raise ValueError(f"a scalar of type {dtype_name(dtype)} is not emulated")
    return ScalarArgument(value, dtype_name(dtype))


def read_array(address: int, kind: DescriptorKind) -> tuple[Item, ...]:
    """Return the list descriptor at ``address``."""
    count, integers, floats, handles = _ARRAY.unpack(ctypes.string_at(address, _ARRAY.size))
    if kind == DescriptorKind.FLOATS:
        return struct.unpack(f"={count}d", ctypes.string_at(floats, 8 * count))
    if kind in (DescriptorKind.INTEGERS, DescriptorKind.BOOLEANS):
        values = struct.unpack(f"={count}q", ctypes.string_at(integers, 8 * count))
        return tuple(map(bool, values)) if kind == DescriptorKind.BOOLEANS else values
    pointers = struct.unpack(f"={count}Q", ctypes.string_at(handles, 8 * count))
    read = read_tensor if kind == DescriptorKind.TENSOR_LIST else read_scalar
    return tuple(read(pointer) if pointer else None for pointer in pointers)


def read(address: int, kind: DescriptorKind) -> Argument:
    """Return the descriptor of ``kind`` at ``address``."""
    if kind == DescriptorKind.TENSOR:
        return read_tensor(address)
    if kind == DescriptorKind.SCALAR:
        return read_scalar(address)
    return read_array(address, kind)
