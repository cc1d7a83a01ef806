"""Seeded values by a counter-based generator on the host: the same bits on every machine, in any order.

Every tensor has a key of its own, made of the run's seed, the case and the tensor's name, so that adding a tensor
changes no other. Values come from integers by exact float64 arithmetic: no library function whose last bit depends on
a processor is involved, and neither is a device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch

_WORD = 0xFFFFFFFF
_HALF = 0xFFFF
# The sum of four 16-bit integers has this mean and variance.
_MEAN = 4 * 65535 / 2
_DEVIATION = math.sqrt(4 * (65536**2 - 1) / 12)


class Draws:
    """Values of one case."""

    def __init__(self, seed: int, name: str) -> None:
        self._prefix = f"{seed}/{name}/"

    def sub(self, name: str) -> Draws:
        """Return draws of a part, independent of all others."""
        part = Draws(0, "")
        part._prefix = f"{self._prefix}{name}/"
        return part

    def words(self, name: str, count: int) -> torch.Tensor:
        """Return int64 [count] words in 0 .. 2**32 - 1."""
        digest = hashlib.sha256(f"{self._prefix}{name}".encode()).digest()
        # Only the raw stream is used: numpy promises it forever, other than what its distributions make of it.
        raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(-(-count // 2))
        pairs = np.stack([raw & np.uint64(_WORD), raw >> np.uint64(32)], 1).astype(np.int64)
        return torch.from_numpy(pairs.ravel()[:count].copy())

    def normal(self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return values of nearly normal distribution (a sum of four uniform ones), deviation ``scale``."""
        count = math.prod(shape)
        words = self.words(name, 2 * count).view(count, 2)
        total = ((words & _HALF) + (words >> 16)).sum(1)
        values = (total.to(torch.float64) - _MEAN) * (scale / _DEVIATION)
        return values.view(shape).to(torch.float32).to(dtype)

    def uniform(self, name: str, *shape: int) -> torch.Tensor:
        """Return float64 in [0, 1), multiples of 2**-32."""
        count = math.prod(shape)
        return (self.words(name, count).to(torch.float64) * 2.0**-32).view(shape)

    def integers(self, name: str, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return int64 in [low, high), for ranges below 2**31."""
        count = math.prod(shape)
        return (low + self.words(name, count) * (high - low) // 2**32).view(shape)

    def bytes(self, name: str, *shape: int) -> torch.Tensor:
        """Return uint8 of any value."""
        count = math.prod(shape)
        words = self.words(name, -(-count // 4))
        parts = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], 1)
        return parts.flatten()[:count].to(torch.uint8).view(shape)

    def permutation(self, name: str, count: int) -> torch.Tensor:
        """Return a permutation of 0 .. count - 1."""
        return self.words(name, count).argsort(stable=True)

    def choice(self, name: str, options: Sequence[int]) -> int:
        """Return one of the options."""
        return options[int(self.integers(name, 0, len(options), 1))]
