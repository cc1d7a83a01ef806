"""Values of the host on their way to the device, which goes on with its work meanwhile.

A copy out of ordinary memory makes the host wait until the device has done all that it was given before (CUDA and CANN
alike), which would end every overlap of planning and computing. One out of page-locked memory only takes its place in
the stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def on_device(values: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host values as a tensor of the device, in the order of its current stream, without waiting for it.

    The page-locked copy is the runtime's own and outlives the transfer, so ``values`` may change or go at once. Where
    the device is the host, nothing is copied: the tensor shares the memory of ``values``, if that is contiguous.

    Args:
        values: an array that may be written to, or a tensor, on the host.
        device: where the tensor is to be.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    if device.type in ("cpu", "meta"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
