"""A driver with some of its parts exchanged by functions: for faults that no change of one element can express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from deepinfer.accelerator import AcceleratorDriver, Availability, OpOptions, registry
from deepinfer.accelerator.plan import REFERENCE
from deepinfer.accelerator.wrapped import OpFunction, WrappedDriver

Rewire = Callable[[OpFunction], OpFunction]
"""Takes an op as the wrapped driver has it, returns what is called in its place."""


class RewiredDriver(WrappedDriver):
    """Another driver, rewired."""

    name: ClassVar[str] = "rewired"

    def __init__(
        self, inner: AcceleratorDriver, ops: Mapping[str, Rewire] | None = None, parts: Mapping[str, Any] | None = None
    ) -> None:
        """Wrap a driver.

        Args:
            inner: what is wrapped.
            ops: replacements of ops by identifier.
            parts: replacements of the driver's own methods by name; each is called as the method would be.
        """
        super().__init__(inner)
        self._ops = ops or {}
        for name, part in (parts or {}).items():
            # Other groups are rewired like the wrapped driver's own.
            setattr(self, "inner_groups" if name == "op_groups" else name, part)

    @classmethod
    def availability(cls) -> Availability:
        """Available where the reference is."""
        return registry.load(REFERENCE).availability()

    def around(self, identifier: str, function: OpFunction, options: OpOptions) -> OpFunction:
        """Return the op's replacement where there is one."""
        rewire = self._ops.get(identifier)
        return super().around(identifier, function, options) if rewire is None else rewire(function)
