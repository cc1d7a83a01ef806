"""Changing one element of a tensor that may lie deep inside frozen values."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import torch

from deepinfer.errors import ArgumentError
from deepinfer_conformance.drivers.faulty.faults import Fault, FaultKind


@dataclasses.dataclass(frozen=True, slots=True)
class Spoiled:
    """A value with one element changed, and the flat index of that element in its tensor."""

    value: object
    element: int


def spoil(value: object, fields: tuple[str, ...], fault: Fault, chance: random.Random) -> Spoiled | None:
    """Return a copy of ``value`` with one element of the tensor at ``fields`` changed; None if it has no such element.

    Raises:
        ArgumentError: if there is no tensor there, or the fault is impossible in its dtype.
    """
    if fields:
        name, *rest = fields
        if not dataclasses.is_dataclass(value) or isinstance(value, type) or not hasattr(value, name):
            raise ArgumentError(
                f"fault in {fault.op!r}", [f"part {fault.part!r}: {type(value).__name__} has no {name!r}"]
            )
        inner = spoil(getattr(value, name), tuple(rest), fault, chance)
        return None if inner is None else Spoiled(dataclasses.replace(value, **{name: inner.value}), inner.element)
    if not isinstance(value, torch.Tensor):
        problem = f"part {fault.part!r} is {type(value).__name__}, not a tensor; name one of its fields or a parameter"
        raise ArgumentError(f"fault in {fault.op!r}", [problem])
    element = _choose(value, fault, chance)
    if element is None:
        return None
    copied = value.clone(memory_format=torch.contiguous_format)
    _change(copied.view(-1), element, fault)
    return Spoiled(copied, element)


def kept(value: object) -> object:
    """Return a copy of a result whose tensors share nothing with it."""
    return _mapped(value, lambda tensor: tensor.clone())


def same_shapes(left: object, right: object) -> bool:
    """Return True if two results of an op agree in the shape and dtype of every tensor."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and left.dtype == right.dtype
    if dataclasses.is_dataclass(left) and type(left) is type(right):
        return all(
            same_shapes(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left)
        )
    return type(left) is type(right)


def _mapped(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _mapped(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def _choose(tensor: torch.Tensor, fault: Fault, chance: random.Random) -> int | None:
    """Return the flat index of the element to change."""
    start, count = 0, tensor.numel()
    if fault.row is not None:
        if tensor.dim() == 0 or fault.row >= tensor.shape[0]:
            return None
        count //= int(tensor.shape[0])
        start = fault.row * count
    if count == 0 or (fault.element is not None and fault.element >= count):
        return None
    return start + (chance.randrange(count) if fault.element is None else fault.element)


def _change(flat: torch.Tensor, element: int, fault: Fault) -> None:
    dtype = flat.dtype
    if fault.kind is FaultKind.BIT:
        if fault.bit >= 8 * dtype.itemsize:
            raise ArgumentError(f"fault in {fault.op!r}", [f"bit {fault.bit} does not exist in {dtype}"])
        byte = element * dtype.itemsize + fault.bit // 8
        flat.view(torch.uint8)[byte] ^= 1 << (fault.bit % 8)
    elif fault.kind is FaultKind.NAN:
        if not dtype.is_floating_point:
            raise ArgumentError(f"fault in {fault.op!r}", [f"part {fault.part!r} is {dtype}, which has no NaN"])
        flat[element] = torch.nan
    elif dtype == torch.bool:
        flat[element] = not flat[element]
    elif dtype.is_floating_point:
        flat[element] += fault.amount
    elif float(fault.amount).is_integer():
        flat[element] += int(fault.amount)
    else:
        problem = f"part {fault.part!r} is {dtype}; amount {fault.amount} is not whole"
        raise ArgumentError(f"fault in {fault.op!r}", [problem])
