"""The NVIDIA driver: registered and honest about itself, without kernels in this release.

Importing this module imports no CUDA runtime; asking for availability does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from deepinfer.accelerator.capabilities import Capabilities
from deepinfer.accelerator.interface import AcceleratorDriver, Availability, MemoryInfo, OpOptions, Reason
from deepinfer.accelerator.ops.base import OpGroup

_NO_KERNELS = Reason(
    "the NVIDIA driver of this release has no kernels yet",
    "use DEEPINFER_ACCELERATOR=cpu_ref, or a later release of deepinfer-multibackend",
)


class Driver(AcceleratorDriver):
    """A place for the CUDA kernels: it claims no op and is never available."""

    name: ClassVar[str] = "nvidia"
    interface_version: ClassVar[tuple[int, int]] = (1, 0)
    version: ClassVar[str] = "0.1.0"

    @classmethod
    def availability(cls) -> Availability:
        """Refuse, and report what is known of the device so that the machine can be prepared."""
        runtime = f"torch {torch.__version__}"
        if torch.version.cuda is None:
            no_build = Reason(
                f"torch {torch.__version__} is built without CUDA",
                "install a CUDA build of torch",
            )
            return Availability((_NO_KERNELS, no_build), runtime=runtime)
        runtime = f"{runtime}, CUDA {torch.version.cuda}"
        if not torch.cuda.is_available():
            no_device = Reason("no CUDA device is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
            return Availability((_NO_KERNELS, no_device), runtime=runtime)
        return Availability((_NO_KERNELS,), device_name=torch.cuda.get_device_name(0), runtime=runtime)

    @property
    def device(self) -> torch.device:
        """The first CUDA device."""
        return torch.device("cuda", 0)

    def memory(self) -> MemoryInfo:
        """Return the device's memory as it is now."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return MemoryInfo(total_bytes=total_bytes, free_bytes=free_bytes)

    def capabilities(self) -> Capabilities:
        """Claim nothing."""
        return Capabilities(ops={})

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:  # noqa: ARG002 (the contract names it)
        """Implement nothing."""
        return {}
