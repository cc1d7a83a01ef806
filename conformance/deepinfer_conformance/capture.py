"""Capturing: a driver around another one that writes the calls of a real run as cases.

``CapturingDriver(driver, folder)`` goes to `build_engine_on` in the driver's place; every op computes as before. Of
each op at most ``per_op`` calls are kept, all of different shapes, so that a long run does not fill a disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import torch

from deepinfer.accelerator import (
    OP_GROUPS,
    AcceleratorDriver,
    Availability,
    Capabilities,
    Collectives,
    LinearShape,
    MemoryInfo,
    OpOptions,
    PreparedWeight,
    Repeatability,
)
from deepinfer.accelerator.ops import OpGroup
from deepinfer_conformance.bench import parameters_of
from deepinfer_conformance.data.call import OpCall, Recipe, mapped, tensors
from deepinfer_conformance.data.layouts import copied
from deepinfer_conformance.data.stored import SUFFIX, save_call

_HOST: Final = torch.device("cpu")


class CapturingDriver(AcceleratorDriver):
    """Another driver whose calls are written to a folder. It carries the wrapped driver's name for the plan."""

    name: ClassVar[str] = "capturing"
    interface_version: ClassVar[tuple[int, int]] = (1, 0)
    version: ClassVar[str] = "1.0"

    def __init__(self, inner: AcceleratorDriver, folder: Path, *, per_op: int = 8) -> None:
        """Wrap a driver; the folder is made if need be."""
        self._inner = inner
        self._folder = folder
        self._per_op = per_op
        self._lock = threading.Lock()
        self._seen: dict[str, list[tuple[object, ...]]] = {}
        self._recipes: dict[int, tuple[PreparedWeight, Recipe]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def availability(cls) -> Availability:
        """Available where the wrapped driver is; the caller has asked it."""
        return Availability(device_name="behind a capture")

    @property
    def written(self) -> int:
        """How many cases lie in the folder by now."""
        return sum(len(shapes) for shapes in self._seen.values())

    @property
    def device(self) -> torch.device:
        """The wrapped driver's."""
        return self._inner.device

    def memory(self) -> MemoryInfo:
        """Return the wrapped driver's."""
        return self._inner.memory()

    def capabilities(self) -> Capabilities:
        """Return the wrapped driver's."""
        return self._inner.capabilities()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate as the wrapped driver does."""
        return self._inner.allocate(shape, dtype)

    def synchronize(self) -> None:
        """Wait as the wrapped driver does."""
        self._inner.synchronize()

    def collectives(self, world_size: int) -> Collectives:
        """Return the wrapped driver's."""
        return self._inner.collectives(world_size)

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Let the wrapped driver prove it."""
        self._inner.set_determinism(level, shapes)

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the wrapped driver's groups with a recorder before every op."""
        groups = self._inner.op_groups(options)
        return {
            each.group: self._recorded(each, groups[each.group], options) for each in OP_GROUPS if each.group in groups
        }

    def _recorded(self, contract: type[OpGroup], group: OpGroup, options: OpOptions) -> OpGroup:
        members: dict[str, object] = {}
        for name in type(group).implemented():
            op = f"{contract.group}.{name}"
            members[name] = staticmethod(self._recorder(op, getattr(group, name), options))
        recorded: OpGroup = type(f"Captured{contract.__name__}", (contract,), members)()
        return recorded

    def _recorder(self, op: str, function: Callable[..., object], options: OpOptions) -> Callable[..., object]:
        names = parameters_of(op)

        def call(*args: object, **keywords: object) -> object:
            arguments = {**dict(zip(names, args, strict=False)), **keywords}
            self._keep(OpCall(op, arguments), options)
            result = function(*args, **keywords)
            if isinstance(result, PreparedWeight):
                # Held, so that its address cannot become another weight's.
                self._recipes[id(result)] = (result, Recipe(op, arguments))
            return result

        return call

    def _keep(self, call: OpCall, options: OpOptions) -> None:
        shape: tuple[object, ...] = tuple((name, tuple(tensor.shape)) for name, tensor in tensors(call.arguments))
        with self._lock:
            seen = self._seen.setdefault(call.op, [])
            if len(seen) >= self._per_op or shape in seen:
                return
            seen.append(shape)
            number = len(seen)
        arguments = {name: self._host(value) for name, value in call.arguments.items()}
        save_call(OpCall(call.op, arguments), options, self._folder / f"{call.op}-{number}{SUFFIX}")

    def _host(self, value: object) -> object:
        if isinstance(value, PreparedWeight):
            return self._recipes[id(value)][1]
        return mapped(value, lambda tensor, _: copied(tensor, _HOST))
