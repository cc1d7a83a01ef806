"""Whether the lanes of one access stay inside the storage of the argument their pointers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepinfer_conformance.triton_cpu.errors import OutOfBoundsError
from deepinfer_conformance.triton_cpu.formats import Array


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that was passed to a launch.

    Attributes:
        name: the kernel's parameter.
        pointer: address of the tensor's first element.
        first: first address that may be touched.
        end: first address behind.
    """

    name: str
    pointer: int
    first: int
    end: int


def operand_of(name: str, tensor: torch.Tensor, *, view_only: bool) -> Operand:
    """The addresses that a kernel may reach from a tensor: its storage, or only what its shape and strides span."""
    if view_only:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = tensor.data_ptr() + (elements * tensor.element_size() if tensor.numel() else 0)
        return Operand(name, tensor.data_ptr(), tensor.data_ptr(), end)
    storage = tensor.untyped_storage()
    return Operand(name, tensor.data_ptr(), storage.data_ptr(), storage.data_ptr() + storage.nbytes())


@dataclass(frozen=True, slots=True)
class Place:
    """Where an access happens: for the message."""

    kernel: str
    program_id: tuple[int, int, int]
    access: str


def check_access(
    place: Place,
    addresses: Array,
    mask: Array | None,
    element_bytes: int,
    operand: Operand | None,
    operands: Sequence[Operand],
) -> None:
    """Raises `OutOfBoundsError` if an unmasked lane leaves its operand.

    A pointer that was derived from a parameter must stay inside that parameter, even where another's memory follows.
    A pointer whose origin is unknown (loaded from memory, made from an integer) must lie inside any of them.
    """
    active = addresses.ravel() if mask is None else addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
    if active.size == 0:
        return
    allowed = (operand,) if operand is not None else tuple(operands)
    inside = np.zeros(active.shape, dtype=bool)
    for item in allowed:
        if item.end - item.first < element_bytes:
            continue
        inside |= (active >= np.uint64(item.first)) & (active <= np.uint64(item.end - element_bytes))
    if inside.all():
        return
    raise _error(place, active[~inside], int(active.size), element_bytes, operand, allowed)


def _error(
    place: Place,
    outside: Array,
    lanes: int,
    element_bytes: int,
    operand: Operand | None,
    allowed: Sequence[Operand],
) -> OutOfBoundsError:
    address = int(outside[0])
    if operand is None:
        spans = ", ".join(f"{item.name!r} [{item.first:#x}, {item.end:#x})" for item in allowed) or "nothing"
        what = f"address {address:#x} through a pointer that comes from no argument; the launch was given {spans}"
        offset, extent = address, (0, 0)
    else:
        offset, extent = address - operand.pointer, (operand.first - operand.pointer, operand.end - operand.pointer)
        elements = f"element {offset // element_bytes}" if offset % element_bytes == 0 else f"byte {offset}"
        what = (
            f"operand {operand.name!r} at {elements} (byte offset {offset}, {element_bytes} bytes wide); "
            f"its extent is bytes [{extent[0]}, {extent[1]}) from the pointer that was passed"
        )
    message = (
        f"kernel {place.kernel!r}, program {place.program_id}: {place.access} out of bounds: {what}; "
        f"{outside.size} of {lanes} unmasked lanes are outside. Mask them off or pass a tensor that holds them"
    )
    return OutOfBoundsError(
        message,
        kernel=place.kernel,
        program_id=place.program_id,
        access=place.access,
        operand=operand.name if operand is not None else "",
        offset_bytes=offset,
        extent_bytes=extent,
    )


def operand_behind(handle: Any) -> Operand | None:
    """The operand that a pointer handle of the interpreter was derived from, as the repaired builder notes it."""
    found = handle.attr.get("operand")
    return found if isinstance(found, Operand) else None
