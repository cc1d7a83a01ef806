"""A driver as a vendor wrote it for interface 1.0. Never edit: when it stops loading, the contract has broken.

It overrides exactly what 1.0 made abstract, and takes the names it needs from where 1.0 put them.
"""

from collections.abc import Mapping

import torch

from deepinfer.accelerator.capabilities import Capabilities
from deepinfer.accelerator.interface import AcceleratorDriver, Availability, MemoryInfo, OpOptions
from deepinfer.accelerator.ops.base import OpGroup


class Driver(AcceleratorDriver):
    """The least driver of interface 1.0."""

    name = "frozen_1_0"
    interface_version = (1, 0)
    version = "1"

    @classmethod
    def availability(cls) -> Availability:
        return Availability(reasons=(), device_name="toy", runtime="none")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total_bytes=1, free_bytes=1, reserved_bytes=0)

    def capabilities(self) -> Capabilities:
        return Capabilities(ops={}, graphs=False, collectives=(), declared_fallbacks=())

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        return {}
