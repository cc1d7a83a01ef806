"""A call of an op as data: what goes in, on the host, by the contract's own parameter names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from deepinfer.accelerator import PreparedWeight


@dataclass(frozen=True, slots=True)
class Recipe:
    """A prepared weight, as the call of the ``prepare`` op that makes it: every driver makes its own."""

    op: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call.

    Attributes:
        op: "group.op".
        arguments: host values by parameter name: tensors, frozen dataclasses of the contract, numbers, recipes.
    """

    op: str
    arguments: Mapping[str, object]

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor at a dotted name."""
        found = self.at(name)
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"argument {name!r} of {self.op} is a {type(found).__name__}, not a tensor")
        return found

    def at(self, name: str) -> object:
        """Return what lies at a dotted name."""
        first, *rest = name.split(".")
        found = self.arguments[first]
        for field in rest:
            found = getattr(found, field)
        return found

    def replacing(self, **arguments: object) -> OpCall:
        """Return the call with some arguments replaced; keys are parameter names."""
        return OpCall(self.op, {**self.arguments, **arguments})


def mapped(value: object, change: Callable[[torch.Tensor, str], torch.Tensor], name: str = "") -> object:
    """Return ``value`` with every tensor replaced by ``change(tensor, dotted name)``, however deep it lies."""
    if isinstance(value, torch.Tensor):
        return change(value, name)
    if isinstance(value, PreparedWeight):  # opaque, and the driver's own
        return value
    if isinstance(value, Recipe):
        return Recipe(value.op, mapped_arguments(value.arguments, change, name))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: mapped(getattr(value, field.name), change, f"{name}.{field.name}")
            for field in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **changed)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change, f"{name}.{number}") for number, item in enumerate(value))
    return value


def mapped_arguments(
    arguments: Mapping[str, object], change: Callable[[torch.Tensor, str], torch.Tensor], prefix: str = ""
) -> dict[str, object]:
    """Return arguments with every tensor changed."""
    dotted = f"{prefix}." if prefix else ""
    return {name: mapped(value, change, f"{dotted}{name}") for name, value in arguments.items()}


def tensors(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in ``value`` with its dotted name, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, PreparedWeight):
        return
    elif isinstance(value, Recipe):
        for key, item in value.arguments.items():
            yield from tensors(item, f"{name}.{key}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors(item, f"{name}.{number}")
