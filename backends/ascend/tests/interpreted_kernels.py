"""The driver on the emulated device, its Triton kernels interpreted on host copies: nothing can launch them there.

Shown by it: which kernels the driver would take on a chip, that they get the tensors they expect from the native ops
around them, and that what they write comes back. It shows nothing about compiled kernels. Callers open the interpreter
(`deepinfer_conformance.triton_cpu.interpreted`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

import torch

from deepinfer.accelerator.capabilities import Capabilities, OpCapability
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops import OpGroup
from deepinfer_ascend import Driver, providers
from deepinfer_ascend.arithmetic import Arithmetic
from deepinfer_ascend.capabilities import claims_of
from deepinfer_ascend.driver import native_groups
from deepinfer_ascend.operators import Operators
from deepinfer_conformance.data.call import mapped

PROVIDER = "triton, interpreted on host copies"


class InterpretedKernels(Driver):
    """Takes the kernels that a Triton for NPUs would compile, and names them by how they run here."""

    def capabilities(self) -> Capabilities:
        """Return the claims on this chip with installed kernels."""
        return claims_of(self.chip, _renamed(providers.triton_claims(_kernel_groups())))

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the driver's own ops, completed by interpreted kernels."""
        own = native_groups(Arithmetic.of(options, self.chip, self.device), Operators())
        others = {name: on_host(kind)(options) for name, kind in _kernel_groups().items()}  # type: ignore[call-arg]
        return MappingProxyType(providers.merged(own, others))


def on_host(kind: type[OpGroup]) -> type[OpGroup]:
    """Return the group with every op called on host copies, whose changes are copied back."""
    members = {name: _moved(getattr(kind, name)) for name in kind.implemented()}
    return type(f"{kind.__name__}OnHost", (kind,), members)


def _moved(op: Callable[..., object]) -> Callable[..., object]:
    signature = inspect.signature(op)

    def call(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def to_host(tensor: torch.Tensor, _: str) -> torch.Tensor:
            if tensor.device.type == "cpu":
                return tensor
            copy = tensor.cpu()
            pairs.append((tensor, copy, copy.clone()))
            return copy

        group, *values = bound.arguments.values()
        device = _device(values)
        result = op(group, *(mapped(value, to_host) for value in values))
        for tensor, copy, before in pairs:
            if not torch.equal(copy.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8)):
                tensor.copy_(copy)
        return mapped(result, lambda tensor, _: tensor.to(device))

    return call


def _device(values: list[object]) -> torch.device:
    found: list[torch.device] = []

    def note(tensor: torch.Tensor, _: str) -> torch.Tensor:
        found.append(tensor.device)
        return tensor

    for value in values:
        mapped(value, note)
    return next((device for device in found if device.type != "cpu"), torch.device("cpu"))


def _kernel_groups() -> dict[str, type[OpGroup]]:
    return providers.triton_groups(targets_npus=lambda: True)


def _renamed(claims: Mapping[str, OpCapability]) -> dict[str, OpCapability]:
    return {op: cast("OpCapability", dataclasses.replace(claim, provider=PROVIDER)) for op, claim in claims.items()}
