"""The Ascend driver: registered and honest about itself, without kernels in this release.

Neither importing this module nor asking for availability imports torch_npu: without CANN that import fails in ways
that leave torch unusable, so the installation is looked up in the package metadata and the device in /dev.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

import torch

from deepinfer.accelerator.capabilities import Capabilities
from deepinfer.accelerator.interface import AcceleratorDriver, Availability, MemoryInfo, OpOptions, Reason
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.errors import DriverUnavailableError

_NO_KERNELS = Reason(
    "the Ascend driver of this release has no kernels yet",
    "use DEEPINFER_ACCELERATOR=cpu_ref, or a later release of deepinfer-multibackend",
)
# The node that the kernel module makes when at least one NPU is attached.
_DEVICE_NODE = Path("/dev/davinci_manager")


class Driver(AcceleratorDriver):
    """A place for the CANN kernels: it claims no op and is never available."""

    name: ClassVar[str] = "ascend"
    interface_version: ClassVar[tuple[int, int]] = (1, 0)
    version: ClassVar[str] = "0.1.0"

    @classmethod
    def availability(cls) -> Availability:
        """Refuse, and report what is known of the runtime and the device so that the machine can be prepared."""
        reasons = [_NO_KERNELS]
        runtime = f"torch {torch.__version__}"
        try:
            runtime = f"{runtime}, torch-npu {version('torch-npu')}"
        except PackageNotFoundError:
            reasons.append(
                Reason("torch-npu is not installed", "install CANN, then pip install 'deepinfer-multibackend[ascend]'")
            )
        if not _DEVICE_NODE.exists():
            reasons.append(
                Reason(f"no Ascend device: {_DEVICE_NODE} does not exist", "install the NPU driver; check npu-smi info")
            )
        return Availability(tuple(reasons), runtime=runtime)

    @property
    def device(self) -> torch.device:
        """The first NPU, under the name that torch_npu registers with torch."""
        return torch.device("npu", 0)

    def memory(self) -> MemoryInfo:
        """Refuse: the runtime that knows is not used by this release."""
        raise DriverUnavailableError(f"{_NO_KERNELS.problem}; {_NO_KERNELS.remedy}")

    def capabilities(self) -> Capabilities:
        """Claim nothing."""
        return Capabilities(ops={})

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:  # noqa: ARG002 (the contract names it)
        """Implement nothing."""
        return {}
