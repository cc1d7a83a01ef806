"""A driver around another one: what stands between an engine and a driver without being either of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch

from deepinfer.accelerator.capabilities import Capabilities, Repeatability
from deepinfer.accelerator.collectives import Collectives, RankPlace
from deepinfer.accelerator.interface import (
    INTERFACE_VERSION,
    AcceleratorDriver,
    Availability,
    Graph,
    LinearShape,
    MemoryInfo,
    OpOptions,
    Stream,
)
from deepinfer.accelerator.ops import OP_GROUPS, OpGroup

OpFunction = Callable[..., object]


class WrappedDriver(AcceleratorDriver):
    """Does everything as the wrapped driver does; a subclass puts something of its own around ops.

    It goes to ``build_engine_on`` in the driver's place. Ops that fall back to the reference are not the wrapped
    driver's, and stay as they are.
    """

    name: ClassVar[str] = "wrapped"
    interface_version: ClassVar[tuple[int, int]] = INTERFACE_VERSION
    version: ClassVar[str] = "1.0"

    def __init__(self, inner: AcceleratorDriver) -> None:
        """Wrap a driver."""
        self._inner = inner

    @classmethod
    def availability(cls) -> Availability:
        """Available where the wrapped driver is; the caller has asked it."""
        return Availability(device_name="behind another driver")

    def around(self, identifier: str, function: OpFunction, options: OpOptions) -> OpFunction:
        """Return what is called in an op's place; the default is the wrapped driver's own.

        Args:
            identifier: "group.op".
            function: the wrapped driver's implementation.
            options: what it was built for.
        """
        del identifier, options
        return function

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

    def runtime_variables(self) -> Mapping[str, str]:
        """Return the wrapped driver's."""
        return self._inner.runtime_variables()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate as the wrapped driver does."""
        return self._inner.allocate(shape, dtype)

    def synchronize(self) -> None:
        """Wait as the wrapped driver does."""
        self._inner.synchronize()

    def new_stream(self) -> Stream:
        """Return the wrapped driver's."""
        return self._inner.new_stream()

    def new_graph(self) -> Graph:
        """Return the wrapped driver's."""
        return self._inner.new_graph()

    def collectives(self, world_size: int) -> Collectives:
        """Return the wrapped driver's."""
        return self._inner.collectives(world_size)

    def join_group(self, place: RankPlace) -> Collectives:
        """Join as the wrapped driver does."""
        return self._inner.join_group(place)

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Let the wrapped driver prove it."""
        self._inner.set_determinism(level, shapes)

    def inner_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the wrapped driver's groups as they are."""
        return self._inner.op_groups(options)

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the wrapped driver's groups with :meth:`around` applied to every op that it has."""
        groups = self.inner_groups(options)
        return {
            contract.group: self._wrapped(contract, groups[contract.group], options)
            for contract in OP_GROUPS
            if contract.group in groups
        }

    def _wrapped(self, contract: type[OpGroup], group: OpGroup, options: OpOptions) -> OpGroup:
        members: dict[str, object] = {
            name: staticmethod(self.around(f"{contract.group}.{name}", getattr(group, name), options))
            for name in type(group).implemented()
        }
        wrapped: OpGroup = type(f"{type(self).__name__}{contract.__name__}", (contract,), members)()
        return wrapped
