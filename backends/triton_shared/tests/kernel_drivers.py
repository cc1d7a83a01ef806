"""Drivers on the host whose ops are the Triton kernels, interpreted: one for each family; nothing else is claimed."""

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
from deepinfer_triton.attention import TritonAttentionOps
from deepinfer_triton.codec import TritonCodecOps
from deepinfer_triton.compression import TritonCompressionOps
from deepinfer_triton.drafting import TritonDraftingOps
from deepinfer_triton.experts import TritonRoutingOps
from deepinfer_triton.feed_forward import TritonExpertOps
from deepinfer_triton.linear import TritonLinearOps
from deepinfer_triton.memory import TritonMemoryOps
from deepinfer_triton.mixing import TritonMixingOps
from deepinfer_triton.moves import TritonMoveOps
from deepinfer_triton.norm import TritonNormOps
from deepinfer_triton.plumbing import TritonPlumbingOps
from deepinfer_triton.sampling import TritonSamplingOps
from deepinfer_triton.selection import TritonSelectionOps


class KernelDriver(AcceleratorDriver):
    """Claims what the kernels of its groups compute, and nothing of the rest."""

    groups: ClassVar[tuple[type[OpGroup], ...]]
    interface_version: ClassVar[tuple[int, int]] = (1, 1)

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
        return Capabilities(MappingProxyType(dict.fromkeys(self.claimed_ops(), claim)))

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        return MappingProxyType({group.group: group(options) for group in self.groups})  # type: ignore[call-arg]

    @classmethod
    def claimed_ops(cls) -> tuple[str, ...]:
        """Return "group.op" of every op that the kernels serve."""
        return tuple(f"{group.group}.{name}" for group in cls.groups for name in group.implemented())


class RowsDriver(KernelDriver):
    """The row-wise ops."""

    name: ClassVar[str] = "triton_rows"
    groups: ClassVar[tuple[type[OpGroup], ...]] = (
        TritonNormOps,
        TritonCodecOps,
        TritonCompressionOps,
        TritonMixingOps,
        TritonMemoryOps,
        TritonRoutingOps,
        TritonPlumbingOps,
        TritonMoveOps,
    )


class PagedDriver(KernelDriver):
    """The ops over cache records."""

    name: ClassVar[str] = "triton_paged"
    groups: ClassVar[tuple[type[OpGroup], ...]] = (TritonAttentionOps, TritonSelectionOps, TritonDraftingOps)


class ProductsDriver(KernelDriver):
    """Products, experts and sampling."""

    name: ClassVar[str] = "triton_products"
    groups: ClassVar[tuple[type[OpGroup], ...]] = (TritonLinearOps, TritonExpertOps, TritonSamplingOps)
