"""Ops that compute on the host whatever device their tensors are on: copies go there, results come back.

For ops that need float64 or 64-bit integers to the bit, which an accelerator may not have: torch_npu, for one, makes
float64 into float32 without a word. Only for ops that write none of their arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from deepinfer.accelerator.ops import OP_GROUPS, OpGroup

Value = TypeVar("Value")
HOST = torch.device("cpu")


def moved(value: Value, device: torch.device) -> Value:
    """Return a value with every tensor in it on ``device``: tensors, dataclasses, tuples, lists and mappings."""
    return cast("Value", _moved(value, device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    return value


def on_host(group: OpGroup, device: torch.device, *, but: Collection[str] = ()) -> OpGroup:
    """Return a group whose ops take tensors of ``device`` and are computed by ``group`` on the host.

    Args:
        group: computes on the host.
        device: where arguments are and results go.
        but: ops that stay on the device, because they write an argument.
    """
    (group_type,) = [kind for kind in OP_GROUPS if kind.group == group.group]
    members = {}
    for name in type(group).implemented():
        compute = getattr(group, name)
        members[name] = staticmethod(compute if name in but else _by_copies(compute, device))
    copying: OpGroup = type(f"{group_type.__name__}OnHost", (group_type,), members)()
    return copying


def _by_copies(compute: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    @wraps(compute)
    def by_copies(*arguments: Any, **named: Any) -> Any:
        return moved(compute(*moved(arguments, HOST), **moved(named, HOST)), device)

    return by_copies
