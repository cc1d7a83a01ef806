"""The driver that wraps another one and spoils what it does."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, cast

import torch

from deepinfer.accelerator import registry
from deepinfer.accelerator.interface import AcceleratorDriver, Availability, OpOptions, Reason
from deepinfer.accelerator.ops import OP_GROUPS
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.accelerator.wrapped import OpFunction, WrappedDriver
from deepinfer.errors import DriverLoadError
from deepinfer_conformance.drivers.faulty.faults import Fault, Strike
from deepinfer_conformance.drivers.faulty.injector import Injector, Target

_WRAPPED_BY_DEFAULT = "cpu_ref"


class FaultyDriver(WrappedDriver):
    """Another driver's ops, struck by faults that are given as data.

    Without faults it is the wrapped driver under another name; this is what the entry point gives, around cpu_ref.
    Claims, memory, streams, graphs, collectives and determinism are the wrapped driver's own.
    """

    name: ClassVar[str] = "faulty"

    def __init__(
        self,
        wrapped: AcceleratorDriver | None = None,
        faults: Sequence[Fault] = (),
        *,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wrap a driver.

        Args:
            wrapped: the driver; None for cpu_ref.
            faults: what goes wrong.
            seed: chooses the elements that faults leave open.
            sleep: how a delay is waited for.
        """
        super().__init__(registry.load(_WRAPPED_BY_DEFAULT)() if wrapped is None else wrapped)
        self._injector = Injector(faults, seed, sleep)

    @classmethod
    def wrapping(cls, driver: AcceleratorDriver, faults: Sequence[Fault], *, seed: int = 0) -> FaultyDriver:
        """Return a faulty driver around ``driver``."""
        return cls(driver, faults, seed=seed)

    @classmethod
    def availability(cls) -> Availability:
        """Available where cpu_ref is."""
        try:
            inner = registry.load(_WRAPPED_BY_DEFAULT).availability()
        except DriverLoadError as error:
            return Availability((Reason(str(error), f"install a driver {_WRAPPED_BY_DEFAULT!r} to wrap"),))
        return Availability(inner.reasons, f"{inner.device_name} (behind the faulty driver)", inner.runtime)

    @property
    def strikes(self) -> tuple[Strike, ...]:
        """Every fault that has happened, in order."""
        return self._injector.strikes

    def calls(self, op: str) -> int:
        """Return how often an op has been called."""
        return self._injector.calls(op)

    @property
    def wrapped(self) -> AcceleratorDriver:
        """The driver behind the faults."""
        return self._inner

    def around(self, identifier: str, function: OpFunction, options: OpOptions) -> OpFunction:
        """Return the op behind the injector. Claims stay as they are: a faulty driver does not confess."""
        del options
        group, _, name = identifier.partition(".")
        target = _target(identifier, function, getattr(_CONTRACT[group], name))

        def call(*args: object, **keywords: object) -> object:
            return self._injector.call(target, args, keywords)

        return call

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate through the injector, as "device.allocate"."""
        target = _target("device.allocate", self.wrapped.allocate, AcceleratorDriver.allocate)
        return cast("torch.Tensor", self._injector.call(target, (shape, dtype), {}))

    def synchronize(self) -> None:
        """Wait through the injector, as "device.synchronize"."""
        target = _target("device.synchronize", self.wrapped.synchronize, AcceleratorDriver.synchronize)
        self._injector.call(target, (), {})


_CONTRACT: Mapping[str, type[OpGroup]] = {group.group: group for group in OP_GROUPS}


def _target(op: str, function: Callable[..., object], declared: Callable[..., object]) -> Target:
    """Return a target whose parameters carry the contract's names, without ``self``."""
    signature = inspect.signature(declared)
    parameters = list(signature.parameters.values())[1:]
    return Target(op, function, signature.replace(parameters=parameters))
