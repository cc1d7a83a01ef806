"""A driver with some of its parts exchanged by functions: for faults that no change of one element can express."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from deepinfer.accelerator import (
    OP_GROUPS,
    AcceleratorDriver,
    Availability,
    Capabilities,
    Collectives,
    Graph,
    LinearShape,
    MemoryInfo,
    OpOptions,
    RankPlace,
    Repeatability,
    Stream,
    registry,
)
from deepinfer.accelerator.ops import OpGroup
from deepinfer.accelerator.plan import REFERENCE

OpFunction = Callable[..., object]
Rewire = Callable[[OpFunction], OpFunction]
"""Takes an op as the wrapped driver has it, returns what is called in its place."""


class RewiredDriver(AcceleratorDriver):
    """Another driver, rewired."""

    name: ClassVar[str] = "rewired"
    interface_version: ClassVar[tuple[int, int]] = (1, 1)
    version: ClassVar[str] = "1.0"

    def __init__(
        self, inner: AcceleratorDriver, ops: Mapping[str, Rewire] | None = None, parts: Mapping[str, Any] | None = None
    ) -> None:
        """Wrap a driver.

        Args:
            inner: what is wrapped.
            ops: replacements of ops by identifier.
            parts: replacements of the driver's own methods by name; each is called as the method would be.
        """
        self._inner = inner
        self._ops = ops or {}
        self._parts = parts or {}

    @classmethod
    def availability(cls) -> Availability:
        """Available where the reference is."""
        return registry.load(REFERENCE).availability()

    @property
    def device(self) -> torch.device:
        """The wrapped driver's."""
        return self._inner.device

    def memory(self) -> MemoryInfo:
        """Return the wrapped driver's."""
        return self._part("memory")()  # type: ignore[no-any-return]

    def capabilities(self) -> Capabilities:
        """Return the wrapped driver's."""
        return self._part("capabilities")()  # type: ignore[no-any-return]

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the wrapped driver's groups with some ops replaced."""
        groups: Mapping[str, OpGroup] = self._part("op_groups")(options)
        return {
            contract.group: self._rewired(contract, groups[contract.group])
            for contract in OP_GROUPS
            if contract.group in groups
        }

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate as the wrapped driver does."""
        return self._part("allocate")(shape, dtype)  # type: ignore[no-any-return]

    def new_stream(self) -> Stream:
        """Return the wrapped driver's."""
        return self._part("new_stream")()  # type: ignore[no-any-return]

    def new_graph(self) -> Graph:
        """Return the wrapped driver's."""
        return self._part("new_graph")()  # type: ignore[no-any-return]

    def collectives(self, world_size: int) -> Collectives:
        """Return the wrapped driver's."""
        return self._part("collectives")(world_size)  # type: ignore[no-any-return]

    def join_group(self, place: RankPlace) -> Collectives:
        """Join as the wrapped driver does."""
        return self._part("join_group")(place)  # type: ignore[no-any-return]

    def set_determinism(self, level: Repeatability, shapes: Sequence[LinearShape]) -> None:
        """Prove as the wrapped driver does."""
        self._part("set_determinism")(level, shapes)

    def _part(self, name: str) -> Any:
        return self._parts.get(name, getattr(self._inner, name))

    def _rewired(self, contract: type[OpGroup], group: OpGroup) -> OpGroup:
        wanted = [name for name in type(group).implemented() if f"{contract.group}.{name}" in self._ops]
        if not wanted:
            return group
        members: dict[str, object] = {name: staticmethod(getattr(group, name)) for name in type(group).implemented()}
        for name in wanted:
            members[name] = staticmethod(self._ops[f"{contract.group}.{name}"](getattr(group, name)))
        rewired: OpGroup = type(f"Rewired{contract.__name__}", (contract,), members)()
        return rewired
