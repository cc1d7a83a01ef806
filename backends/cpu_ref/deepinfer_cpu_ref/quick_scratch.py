"""Memory for passing values that is used again from call to call.

A fresh page costs more than a pass over it: where memory is virtual twice, several times more.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
from numpy.typing import NDArray

_NUMPY_TYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}


class Scratch(threading.local):
    """Buffers by name, each as large as it ever had to be; every thread has its own."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that holds anything and shares its memory with all others of that name."""
        numpy_type = np.dtype(_NUMPY_TYPES[dtype])
        size = math.prod(shape) * numpy_type.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            # Kept by numpy: a tensor that is made in inference mode could not be written outside of it.
            buffer = self._buffers[name] = np.empty(size, dtype=np.uint8)
        return torch.from_numpy(buffer[:size].view(numpy_type).reshape(shape))
