"""A driver on the host whose products, experts and sampling are the Triton kernels, interpreted.

Everything else is the reference's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch

from deepinfer.accelerator import (
    AcceleratorDriver,
    Availability,
    Capabilities,
    MemoryInfo,
    OpCapability,
    OpOptions,
    Repeatability,
)
from deepinfer.accelerator.ops import OpGroup
from deepinfer_triton.feed_forward import TritonExpertOps
from deepinfer_triton.linear import TritonLinearOps
from deepinfer_triton.sampling import TritonSamplingOps

GROUPS: tuple[type[OpGroup], ...] = (TritonLinearOps, TritonExpertOps, TritonSamplingOps)


class ProductsDriver(AcceleratorDriver):
    """Claims what the kernels compute, and nothing of the rest."""

    name: ClassVar[str] = "triton_products"
    interface_version: ClassVar[tuple[int, int]] = (1, 0)

    @classmethod
    def availability(cls) -> Availability:
        return Availability(device_name="host", runtime=f"torch {torch.__version__}")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        return MemoryInfo(2**30, 2**30)

    def capabilities(self) -> Capabilities:
        claim = OpCapability(
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            numerics=frozenset({"portable", "served"}),
            kv_formats=frozenset({"released", "float32"}),
            repeatability=Repeatability.BATCH_INVARIANT,
            provider="interpreted triton",
        )
        return Capabilities(MappingProxyType(dict.fromkeys(claimed_ops(), claim)))

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        return MappingProxyType({group.group: group(options) for group in GROUPS})  # type: ignore[call-arg]


def claimed_ops() -> tuple[str, ...]:
    """Return "group.op" of every op that the kernels serve."""
    return tuple(f"{group.group}.{name}" for group in GROUPS for name in group.implemented())
