"""Operators that make values from nothing. Random numbers are reproducible, but not those of the chip."""

from __future__ import annotations

import torch
from torch import Tensor

from host_cann.kernels.registry import KernelTable
from host_cann.views import store

TABLE = KernelTable()


@TABLE.add("aclnnArange(scalar start, scalar end, scalar step, out*)")
def arange(start: float, end: float, step: float, out: Tensor) -> None:
    store(out, torch.arange(start, end, step, dtype=out.dtype))


@TABLE.add("aclnnLinspace(scalar start, scalar end, int steps, out*)")
def linspace(start: float, end: float, steps: int, out: Tensor) -> None:
    store(out, torch.linspace(start, end, steps, dtype=out.dtype))


@TABLE.add("aclnnEye(int n, int m, out*)")
def eye(n: int, m: int, out: Tensor) -> None:
    store(out, torch.eye(n, m, dtype=out.dtype))


def _generator(seed: int, offset: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % (1 << 63))


@TABLE.add("aclnnInplaceUniform(self*, double low, double high, int seed, int offset)")
def uniform(self: Tensor, low: float, high: float, seed: int, offset: int) -> None:
    self.uniform_(low, high, generator=_generator(seed, offset))


@TABLE.add("aclnnInplaceNormal(self*, float mean, float std, int seed, int offset)")
def normal(self: Tensor, mean: float, std: float, seed: int, offset: int) -> None:
    self.normal_(mean, std, generator=_generator(seed, offset))


@TABLE.add("aclnnInplaceRandom(self*, int low, int high, int seed, int offset)")
def random(self: Tensor, low: int, high: int, seed: int, offset: int) -> None:
    self.random_(low, high, generator=_generator(seed, offset))


@TABLE.add("aclnnRandperm(int n, int seed, int offset, out*)")
def randperm(n: int, seed: int, offset: int, out: Tensor) -> None:
    store(out, torch.randperm(n, generator=_generator(seed, offset)))
